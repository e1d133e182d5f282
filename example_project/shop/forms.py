from django import forms

from .models import Order
from .payments import CARDS, GOOD_CARD


class OrderForm(forms.ModelForm):
    card = forms.ChoiceField(choices=CARDS, initial=GOOD_CARD, widget=forms.RadioSelect)

    class Meta:
        model = Order
        fields = ("name", "email", "item", "total")
        widgets = {
            "name": forms.TextInput(attrs={"autocomplete": "name", "dir": "auto"}),
            "email": forms.EmailInput(attrs={"autocomplete": "email"}),
            "item": forms.TextInput(attrs={"dir": "auto"}),
        }

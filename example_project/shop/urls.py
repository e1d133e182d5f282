from django.urls import path

from . import views

urlpatterns = [
    path("", views.shop, name="shop"),
    path("orders/<int:order_id>/", views.order_detail, name="order"),
]

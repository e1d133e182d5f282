import sys

from django.conf import settings
from django.core.management import BaseCommand, CommandError

from shop.demo.story import DemoFailed, Story
from shop.processes import interrupt_on_termination


class Command(BaseCommand):
    help = (
        "Empty the shop, place a few hundred orders, some of them rolled back on purpose, let a worker mail "
        "their receipts, and check every mail. Leaves .demo/mail/*.eml, .demo/demo.json and .demo/worker.log."
    )

    def handle(self, **options: object) -> None:
        interrupt_on_termination()
        try:
            Story(settings.BASE_DIR.parent / ".demo", self.stdout.write).tell()
        except DemoFailed as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            sys.exit("Interrupted.")

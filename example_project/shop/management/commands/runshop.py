from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import BaseCommand, CommandParser, call_command

from shop.processes import interrupt_on_termination, running_worker

STAFF_NAME = STAFF_PASSWORD = "demo"


class Command(BaseCommand):
    help = "Migrate, then run the web server and one worker until Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("addrport", nargs="?", default="127.0.0.1:8000", help="default: %(default)s")

    def handle(self, *, addrport: str, **options: object) -> None:
        call_command("migrate", verbosity=0)
        users = get_user_model()._default_manager
        if not users.filter(is_superuser=True).exists():
            users.create_superuser(STAFF_NAME, password=STAFF_PASSWORD)
            self.stdout.write(f"Created the user {STAFF_NAME!r} with the password {STAFF_PASSWORD!r}.")
        self.stdout.write(f"Receipts go to {settings.RECEIPTS_GO_TO}.")
        interrupt_on_termination()
        with running_worker():
            call_command("runserver", addrport, use_reloader=False)

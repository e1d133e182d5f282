from common_settings import *  # noqa: F403
from common_settings import FRAMEWORK, OTHER_BACKENDS

TASKS = {
    "default": {"BACKEND": f"{FRAMEWORK}.backends.immediate.ImmediateBackend", "QUEUES": ["default", "email"]},
    "reports": {"BACKEND": f"{FRAMEWORK}.backends.immediate.ImmediateBackend", "QUEUES": ["reports"]},
    **OTHER_BACKENDS,
}

from .framework import task
from .models import Loan


class LoanRefused(Exception):
    pass


@task
def lend(title, *, days=14):
    Loan.objects.create(title=title)
    return {"title": title, "days": days}


@task()
def nothing():
    pass


@task(queue_name="email", priority=30)
def remind(reader):
    return f"reminded {reader}"


@task(backend="reports", queue_name="reports", takes_context=True)
def report(context, month):
    result = context.task_result
    return {
        "month": month,
        "attempt": context.attempt,
        "status": str(result.status),
        "task": result.task.name,
        "args": result.args,
        "is finished": result.is_finished,
        "errors": len(result.errors),
        "workers": len(result.worker_ids),
        "has its id": bool(result.id),
    }


@task
def refuse(reader):
    Loan.objects.create(title=f"refused to {reader}")
    raise LoanRefused(f"{reader} has too many books")


@task
def end_the_process():
    raise SystemExit(3)


@task
def return_what_is_no_json():
    return Loan


@task
async def lend_async(title):
    loan = await Loan.objects.acreate(title=title)
    return loan.title


@task(takes_context=True)
async def tell_attempt_async(context):
    return context.attempt


@task
async def refuse_async(reader):
    raise LoanRefused(f"{reader} has too many books")


@task
def echo(value):
    return value


@task
def lend_another(title):
    return lend.enqueue(title).task.name


@task(backend="immediate")
def at_once(number):
    return number + 1


@task(backend="dummy")
def never(number):
    return number + 1

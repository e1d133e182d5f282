from django_pgqueue.models import Job
from django_pgqueue.testing import run_jobs
from tests.app.tasks import add


def test_smoke(db):
    result = add.enqueue(1, b=2)
    assert result.status == "READY"
    [ran] = run_jobs()
    assert ran.return_value == 3
    result.refresh()
    assert result.status == "SUCCESSFUL", Job.objects.values()
    assert add.enqueue_many([[1, 2], {"a": 1, "b": 4}])
    assert [r.return_value for r in run_jobs()] == [3, 5]

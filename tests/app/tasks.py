"""Tasks with telling names, and the effects they leave."""

from django_pgqueue import task


@task
def add(a, b):
    return a + b

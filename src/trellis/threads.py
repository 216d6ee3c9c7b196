"""How the threads of a program wait for work."""

import os

#: The threads of OpenMP spin while they wait for each other, and beside another busy program they
#: then take the cores of the threads that they wait for. With these variables they sleep after a
#: short while. OMP_WAIT_POLICY is the standard's; GNU's library, which torch brings on Linux, goes
#: by the second alone where it is set: threads that sleep at once are woken for every operator.
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}


def sleep_while_waiting() -> None:
    """Sets WAITING for this program, unless one of the variables is set. OpenMP reads them when
    torch is imported, so this comes first."""
    if not any(name in os.environ for name in WAITING):
        os.environ.update(WAITING)

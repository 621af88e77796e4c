"""Say plainly that Python is too old, before anything else fails over it. Runs on any Python 3."""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "This course needs Python 3.11 or newer; {}.{} answered. Name another one: make lab PYTHON=python3.12".format(
            *sys.version_info[:2]
        )
    )

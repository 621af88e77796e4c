"""Fetch the model file before it is needed: `python -m lessonlib.lab`."""

import sys

from lessonlib.lab.pretrained import fetch

try:
    print(f"model file: {fetch()}")
except ConnectionError as problem:
    sys.exit(str(problem))
except KeyboardInterrupt:
    sys.exit("interrupted; run the same command to start again")

"""The library behind the course: small, exact functions that predict how a language model serves.

The modules at the top (units, accelerators, models, roofline, latency, ...) are plain arithmetic on numpy.
`lessonlib.lab` runs a real model on this machine, `lessonlib.explorers` draws, `lessonlib.practice` asks.
"""

__version__ = "0.1.0"

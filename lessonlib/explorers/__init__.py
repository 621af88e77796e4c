"""Pictures that answer to sliders: one file a picture."""

import os

# Read when ipywidgets is first imported: a control's new value is not echoed to the browser it came from, which is one
# message less for every move.
os.environ.setdefault("JUPYTER_WIDGETS_ECHO", "0")

"""Settings of the Jupyter server that `make lab` starts.

A slider's answer is a small message. With TCP's usual batching it waits up to 40 ms for the browser's delayed
acknowledgement of the one before; TCP_NODELAY sends it at once.
"""

from jupyter_server.services.kernels import websocket

_open = websocket.KernelWebsocketHandler.open


async def _open_without_delay(self, *args, **kwargs):
    self.set_nodelay(True)
    opening = _open(self, *args, **kwargs)
    if opening is not None:
        await opening


websocket.KernelWebsocketHandler.open = _open_without_delay

"""What holds for every test of this folder."""

import os

# vLLM chooses its platform when it is first imported. On the host mesh that needs neither hardware nor ttnn.
os.environ.setdefault("MESH_DEVICE", "host")

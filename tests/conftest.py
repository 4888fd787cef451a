"""What every test process needs before anything else."""

import os

# torch asks the name server for the name of every address that it connects to, loopback included; an answer
# that is lost would cost 5 s, more than some tests wait for.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

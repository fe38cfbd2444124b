"""Workers of Ray, in tests: forked from one process a node that has imported what all of them import.

Python reads this file at its start where PYTHONPATH names this folder. In the agent of a node it begins that process,
in what a raylet starts as a worker it hands over to it; in any other process it does nothing.
"""

import sys

command = [word for word in sys.orig_argv if word != "-u"]
script = command[1] if len(command) > 1 else ""
if script.endswith("/ray/_private/runtime_env/agent/main.py"):
    import handover

    handover.begin()
elif script.endswith(("/ray/_private/workers/setup_worker.py", "/ray/_private/workers/default_worker.py")):
    import handover

    handover.to_fork(command[1:])

"""What a driver's workers have in their environment: Ray calls this where RAY_RUNTIME_ENV_HOOK names it."""

import json
import os
from typing import Any

NAMES = "DDM_WORKERS_ENVIRONMENT"


def with_names(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    return {**(runtime_env or {}), "env_vars": json.loads(os.environ[NAMES])}

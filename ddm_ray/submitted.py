"""The Ray job that this process was submitted as. Imports the standard library only."""

import json
import os
from contextlib import suppress


def submitted_job() -> str | None:
    """The submission id of this process's Ray job; None outside a job. Ray passes it in the environment."""
    job_config = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    if job_config is None:
        return None
    with suppress(ValueError, AttributeError):
        return str(json.loads(job_config).get("metadata", {}).get("job_submission_id", ""))
    return ""

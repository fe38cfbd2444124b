"""A stage made chunk by chunk: planned once, resumable after any kill, run by Ray Data or in one process.

A plan lists units of work (`chunk_store`). A stage reads a unit as chunks, and makes each chunk into files and a record
(`work`). `stage` finds the chunks without a record and runs an executor (`serial`, `ray_data`) to make them. Storage
decides between concurrent commands: plan and records are created if absent, after the files that they name.
"""

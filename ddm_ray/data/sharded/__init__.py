"""A stage made chunk by chunk: planned once, resumable after any kill, run by Ray Data or in one process.

A plan lists units of work (`chunk_store`). A stage reads a unit as chunks and makes each into files and a record
(`work`); `stage` finds the chunks that lack a record and has an executor (`serial`, `ray_data`) make them. Storage
decides between concurrent commands: plan and records are created if absent, after the files that they name.
"""

"""Objects on a disk or in a bucket, with retries and checksums; nothing here knows what a run is."""

"""`prepare`: a source decoded, embedded and encoded, part by part, into the artifact of rows."""

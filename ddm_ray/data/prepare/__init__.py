"""The stage `prepare`: decodes, embeds and encodes a source, part by part, into the artifact of rows."""

"""File formats of records, one module each: units of a file, and the records in a range."""

"""All that one server holds: rows by id, dense parts, what they contain. Pure, and without torch."""

"""Everything that measures or demonstrates; nothing here is needed to serve."""

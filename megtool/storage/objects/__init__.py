"""Objects of stores as open files: read in ranges, written in parts, locked by leases."""

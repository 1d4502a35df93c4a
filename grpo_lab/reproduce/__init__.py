"""A finished run again, from its own record, and what came out otherwise."""

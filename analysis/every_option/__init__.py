"""Whether every option of the catalogue learns in the environment of the tests, and where it acts."""

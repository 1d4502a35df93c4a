"""The documentation site: pages of the repository, gathered where they are and built with zensical."""

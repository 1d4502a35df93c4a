"""The report of a sweep as one offline page, and the reader of training responses."""

"""What one question costs on a cluster, on paper: `PYTHONPATH=analysis python -m cluster_cost`."""

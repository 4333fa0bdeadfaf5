"""The base SSL algorithms, one file each."""

//! Datasets: rows of the table; bytes lie in files.

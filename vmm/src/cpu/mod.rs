//! vCPU threads and their exits.

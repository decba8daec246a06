//! Kernel loading and the PVH hand-over.

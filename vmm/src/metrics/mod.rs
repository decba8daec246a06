//! The registry of metrics and its exposition.

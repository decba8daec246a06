//! The REST API: Cloud Hypervisor's calls and ours.

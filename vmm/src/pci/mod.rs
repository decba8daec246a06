//! The PCI root, ECAM configuration space and MSI-X.

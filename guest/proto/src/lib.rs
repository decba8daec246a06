//! What the guest's agent and the VMM say to each other.

//! `--no-shutdown`.

/// Reaction of the VMM when the guest shuts down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtGuestShutdown {
    #[default]
    End,
    /// Shut down the VM, and continue to serve the API (`--no-shutdown`).
    Stay,
}

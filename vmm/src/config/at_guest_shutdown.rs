//! `--no-shutdown`.

/// Action of the VMM when the guest shuts down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtGuestShutdown {
    #[default]
    End,
    /// Shut down the VM, but keep serving the API (`--no-shutdown`).
    Stay,
}

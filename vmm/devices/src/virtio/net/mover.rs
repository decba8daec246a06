//! Decides whether vhost-net or this process transfers the frames.

use tracing::info;

use super::config::VhostMode;
use super::vhost::VhostError;

/// Returns true if the host's kernel should transfer the frames of the device `net`. `probe` checks
/// that vhost-net is usable.
pub(super) fn is_kernel_used(
    mode: VhostMode,
    net: &str,
    probe: impl FnOnce() -> Result<(), VhostError>,
) -> Result<bool, VhostError> {
    match mode {
        VhostMode::Off => Ok(false),
        VhostMode::On => probe().map(|()| true),
        VhostMode::Auto => {
            let result = probe();
            if let Err(err) = &result {
                info!(
                    net,
                    error = err as &dyn std::error::Error,
                    "vhost-net is not available; the VMM transfers the frames"
                );
            }
            Ok(result.is_ok())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn no_device() -> Result<(), VhostError> {
        Err(VhostError::Open(io::ErrorKind::NotFound.into()))
    }

    #[test]
    fn vhost_is_used_if_requested_and_possible() {
        assert!(
            !is_kernel_used(VhostMode::Off, "n", || panic!("vhost-net was not requested")).unwrap()
        );
        assert!(is_kernel_used(VhostMode::On, "n", || Ok(())).unwrap());
        assert!(is_kernel_used(VhostMode::Auto, "n", || Ok(())).unwrap());
        assert!(!is_kernel_used(VhostMode::Auto, "n", no_device).unwrap());
        let error = is_kernel_used(VhostMode::On, "n", no_device).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot open /dev/vhost-net; is the module vhost_net loaded?"
        );
    }
}

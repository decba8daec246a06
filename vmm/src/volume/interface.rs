//! Which interface a volume gets: pure, one table.
//!
//! | interface | translation | safe with |
//! |---|---|---|
//! | `nvdimm` | the guest's BTT driver, flushes without waiting | every Linux, any number of vCPUs |
//! | `virtio-pmem` | the guest's BTT driver, flushes that must not wait | one possible vCPU |

use thiserror::Error;

use crate::config::VolumeInterface;

/// An interface that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// An NVDIMM in the NFIT.
    Nvdimm,
    /// A virtio-pmem device.
    VirtioPmem,
}

/// What the payload is, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A Linux kernel that is known as one.
    Linux,
    /// Anything else.
    Unknown,
}

/// Why an interface is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InterfaceError {
    /// The guest's BTT flushes under a spinlock, and with several vCPUs the answer of a virtio-pmem device cannot
    /// be there in time.
    #[error(
        "--pm-volume name={name}: interface=virtio-pmem is unsafe with more than one possible vCPU (max={max_vcpus}): \
         the guest's BTT driver flushes under a spinlock and would have to sleep there; use interface=nvdimm, \
         max=1, or force=on"
    )]
    UnsafeVirtioPmem {
        /// The volume.
        name: String,
        /// How many vCPUs there may be.
        max_vcpus: u8,
    },
    /// `auto` has nothing that such a guest surely can use.
    #[error(
        "--pm-volume name={name}: interface=auto finds no interface for a payload that is not a known Linux \
         kernel; name one: nvdimm or virtio-pmem"
    )]
    NothingSafe {
        /// The volume.
        name: String,
    },
}

/// Chooses the interface of the volume called `name`, or says why the wish is refused.
pub fn choose(
    name: &str,
    wish: VolumeInterface,
    max_vcpus: u8,
    payload: Payload,
    force: bool,
) -> Result<Chosen, InterfaceError> {
    match (wish, payload) {
        (VolumeInterface::Nvdimm, _) | (VolumeInterface::Auto, Payload::Linux) => Ok(Chosen::Nvdimm),
        (VolumeInterface::Auto, Payload::Unknown) => {
            Err(InterfaceError::NothingSafe { name: name.to_owned() })
        }
        (VolumeInterface::VirtioPmem, _) if max_vcpus > 1 && !force => {
            Err(InterfaceError::UnsafeVirtioPmem { name: name.to_owned(), max_vcpus })
        }
        (VolumeInterface::VirtioPmem, _) => Ok(Chosen::VirtioPmem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_interfaces() {
        use Payload::{Linux, Unknown};
        use VolumeInterface::{Auto, Nvdimm, VirtioPmem};
        let chosen = |wish, vcpus, payload, force| choose("v", wish, vcpus, payload, force).ok();
        assert_eq!(chosen(Auto, 1, Linux, false), Some(Chosen::Nvdimm));
        assert_eq!(chosen(Auto, 64, Linux, false), Some(Chosen::Nvdimm));
        assert_eq!(chosen(Auto, 1, Unknown, false), None);
        assert_eq!(chosen(Auto, 1, Unknown, true), None);
        assert_eq!(chosen(Nvdimm, 4, Unknown, false), Some(Chosen::Nvdimm));
        assert_eq!(chosen(VirtioPmem, 1, Linux, false), Some(Chosen::VirtioPmem));
        assert_eq!(chosen(VirtioPmem, 2, Linux, false), None);
        assert_eq!(chosen(VirtioPmem, 2, Linux, true), Some(Chosen::VirtioPmem));
    }

    #[test]
    fn a_refusal_names_the_volume_the_count_and_the_way_out() {
        let text =
            choose("data", VolumeInterface::VirtioPmem, 2, Payload::Linux, false).unwrap_err().to_string();
        for part in ["data", "max=2", "spinlock", "interface=nvdimm", "force=on"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}

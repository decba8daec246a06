//! Chooses a volume's interface by this table, without side effects.
//!
//! | format | interface | translation | safe with |
//! |---|---|---|---|
//! | btt | `nvdimm` | the guest's BTT driver, with flushes that do not block | every Linux, any number of vCPUs |
//! | btt | `virtio-pmem` | the guest's BTT driver, with flushes that must not block | one possible vCPU |
//! | btt | `virtio-blk` | the VMM's BTT engine | every guest, any number of vCPUs |
//! | raw | `virtio-pmem` | none; flushes may block | every guest with the driver, any number of vCPUs |
//! | raw | `nvdimm` | none | pools on which a fence is a flush |
//!
//! To map a thin volume, the VMM must fill holes while the guest stores into them. A store cannot
//! fail, so `on_full=error` needs a volume that is guaranteed as a whole. `auto` selects
//! `virtio-blk` if a thin volume cannot be mapped, or if it is guaranteed only in part, because
//! Linux cannot return memory while one of its vCPUs waits in a store.

use std::collections::BTreeSet;
use std::fmt;

use foreshore_types::VolumeFormat;
use foreshore_types::size::Size;
use pmem_volume::Durability;
use thiserror::Error;

use super::config::{OnFull, PmVolumeConfig, VolumeInterface};
use crate::memory::layout::MAX_NVDIMMS;

/// Chosen interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// An NVDIMM in the NFIT.
    Nvdimm,
    /// A virtio-pmem device.
    VirtioPmem,
    /// A virtio-blk disk.
    VirtioBlk,
}

impl Chosen {
    /// Returns true if the guest's driver translates the sectors of a BTT instead of the VMM.
    pub const fn guest_translates(self) -> bool {
        match self {
            Self::Nvdimm | Self::VirtioPmem => true,
            Self::VirtioBlk => false,
        }
    }

    /// Name in `interface=` and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvdimm => "nvdimm",
            Self::VirtioPmem => "virtio-pmem",
            Self::VirtioBlk => "virtio-blk",
        }
    }

    /// ID of a volume's device in the API. An NVDIMM is not on the PCI bus and has none.
    pub fn device_id(self, volume: &str) -> Option<String> {
        match self {
            Self::Nvdimm => None,
            Self::VirtioPmem => Some(format!("pmem-{volume}")),
            Self::VirtioBlk => Some(volume.to_owned()),
        }
    }
}

/// Kind of the boot payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Recognized Linux kernel.
    Linux,
    Unknown,
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum InterfaceError {
    /// The guest's BTT driver flushes while it holds a spinlock. With several vCPUs, the response
    /// of a virtio-pmem device would come too late.
    #[error(
        "--pm-volume name={name}: interface=virtio-pmem is unsafe with more than one possible vCPU (max={max_vcpus}): \
         the guest's BTT driver flushes under a spinlock, where it must not sleep; use interface=nvdimm, \
         interface=virtio-blk, max=1, or force=on"
    )]
    UnsafeVirtioPmem {
        name: String,
        /// Maximum number of vCPUs.
        max_vcpus: u8,
    },
    /// Raw bytes do not have the guarantees of a disk.
    #[error(
        "--pm-volume name={name}: interface=virtio-blk serves the sectors of a BTT, but the volume has format=raw; use \
         interface=virtio-pmem"
    )]
    RawBlocks { name: String },
    /// The guest would store into chunks that the volume does not have.
    #[error(
        "--pm-volume name={name}: interface={} of a thin volume needs userfaultfd: {reason}; use interface=virtio-blk, or \
         make the volume thick (thin=off for a new volume, else pmvol volume convert --thick)",
        interface.name()
    )]
    ThinMapped { name: String, interface: Chosen, reason: String },
    /// A store cannot report that the pool is full.
    #[error(
        "--pm-volume name={name}: on_full=error is impossible with interface={}, because a store into the volume cannot \
         fail, and {overcommit}; use on_full=pause, interface=virtio-blk, or raise the reserve (pmvol volume resize \
         --reserve)",
        interface.name()
    )]
    StoreError { name: String, interface: Chosen, overcommit: Overcommit },
    /// Devices do not reach volumes with holes. Linux lets programs map the files of a raw volume
    /// (DAX) and use such memory for direct I/O with other disks, which would fail.
    #[error(
        "--pm-volume name={name}: a thin volume with format=raw has no interface, because other devices of the guest \
         could not transfer to its holes; make the volume thick (pmvol volume convert --thick)"
    )]
    ThinRaw { name: String },
    /// Two devices have the same id, so the API could not distinguish them. The guest could not
    /// distinguish two such disks either, because the id is the serial number.
    #[error(
        "--pm-volume name={name}: another device of this VM has the id {id}; rename the volume (pmvol volume rename), or \
         give the other device another id="
    )]
    SameId {
        name: String,
        /// ID of the volume's device.
        id: String,
    },
    /// The firmware tables describe NVDIMMs at boot. Linux adds others only if a method of these
    /// tables (`_FIT`) returns them, and cannot remove any.
    #[error(
        "--pm-volume name={name}: interface=nvdimm is possible only at boot, because the firmware tables describe \
         NVDIMMs; use interface=virtio-blk, or shut the VM down first"
    )]
    NvdimmAtRunTime { name: String },
    /// The number of flush hint pages and health registers is limited.
    #[error(
        "--pm-volume: {count} volumes would be NVDIMMs, but a guest can have at most {MAX_NVDIMMS}; choose another \
         interface for the rest"
    )]
    TooManyNvdimms {
        /// Number of volumes with this interface.
        count: usize,
    },
    /// Programs in the guest would rely on a fence to flush, and would lose data on a power loss.
    #[error(
        "--pm-volume name={name}: interface=nvdimm with format=raw is unsafe on a {} pool: the guest allows MAP_SYNC \
         on an NVDIMM and treats a fence as a flush, but this pool needs an explicit flush; use \
         interface=virtio-pmem, readonly=on, or force=on",
        durability.name()
    )]
    UnsafeRawNvdimm {
        name: String,
        /// Durability of the pool.
        durability: Durability,
    },
}

/// Sizes of a thin volume that is guaranteed in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overcommit {
    pub reserve_bytes: u64,
    pub size_bytes: u64,
}

impl fmt::Display for Overcommit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its reserve is {} of {}", Size(self.reserve_bytes), Size(self.size_bytes))
    }
}

/// Allocation of the stored volume, or of the volume that will be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocation {
    Thick,
    Thin {
        overcommit: Option<Overcommit>,
        /// Reason why the VMM cannot fill holes into which the guest stores.
        refusal: Option<String>,
        /// Reason why `auto` must not map the volume, which would leave too few mappings.
        excess: Option<String>,
    },
}

impl Allocation {
    /// Returns the reason why `auto` does not map the volume. `None` if it may be mapped.
    pub fn unmapped_reason(&self, volume: &PmVolumeConfig) -> Option<String> {
        let Self::Thin { overcommit, refusal, excess } = self else { return None };
        let unfilled_reason = || match overcommit {
            _ if volume.readonly => None,
            Some(overcommit) => Some(overcommit.to_string()),
            None => refusal.clone(),
        };
        excess.clone().or_else(unfilled_reason)
    }
}

/// Chooses the volume's interface. If the requested interface is unsafe, returns the reason.
pub fn choose(
    volume: &PmVolumeConfig,
    allocation: &Allocation,
    max_vcpus: u8,
    payload: Payload,
) -> Result<Chosen, InterfaceError> {
    if let Some(chosen) = choose_for_thin(volume, allocation)? {
        return Ok(chosen);
    }
    match volume.format {
        VolumeFormat::Btt => choose_for_btt(volume, max_vcpus, payload),
        VolumeFormat::Raw => choose_for_raw(volume),
    }
}

fn choose_for_btt(
    volume: &PmVolumeConfig,
    max_vcpus: u8,
    payload: Payload,
) -> Result<Chosen, InterfaceError> {
    let name = || volume.name.clone();
    match (volume.interface, payload) {
        (VolumeInterface::Nvdimm, _) | (VolumeInterface::Auto, Payload::Linux) => {
            Ok(Chosen::Nvdimm)
        }
        // Payloads without an NVDIMM driver, such as firmware, do have a virtio-blk driver.
        (VolumeInterface::VirtioBlk, _) | (VolumeInterface::Auto, Payload::Unknown) => {
            Ok(Chosen::VirtioBlk)
        }
        (VolumeInterface::VirtioPmem, _) if max_vcpus > 1 && !volume.force => {
            Err(InterfaceError::UnsafeVirtioPmem { name: name(), max_vcpus })
        }
        (VolumeInterface::VirtioPmem, _) => Ok(Chosen::VirtioPmem),
    }
}

/// Returns `None` if the rules for a thick volume apply.
fn choose_for_thin(
    volume: &PmVolumeConfig,
    allocation: &Allocation,
) -> Result<Option<Chosen>, InterfaceError> {
    let Allocation::Thin { overcommit, refusal, .. } = allocation else { return Ok(None) };
    let name = || volume.name.clone();
    let interface = match (volume.format, volume.interface) {
        (VolumeFormat::Raw, _) => return Err(InterfaceError::ThinRaw { name: name() }),
        (VolumeFormat::Btt, VolumeInterface::VirtioBlk) => return Ok(Some(Chosen::VirtioBlk)),
        (VolumeFormat::Btt, VolumeInterface::Auto) => {
            return Ok(allocation.unmapped_reason(volume).map(|_| Chosen::VirtioBlk));
        }
        (VolumeFormat::Btt, VolumeInterface::Nvdimm) => Chosen::Nvdimm,
        (VolumeFormat::Btt, VolumeInterface::VirtioPmem) => Chosen::VirtioPmem,
    };
    match (*overcommit, volume.on_full, refusal) {
        _ if volume.readonly => Ok(None),
        (Some(overcommit), OnFull::Error, _) => {
            Err(InterfaceError::StoreError { name: name(), interface, overcommit })
        }
        (.., Some(reason)) => {
            Err(InterfaceError::ThinMapped { name: name(), interface, reason: reason.clone() })
        }
        (.., None) => Ok(None),
    }
}

/// virtio-pmem is safe on every pool. Linux also creates the struct pages that DAX requires. For an
/// NVDIMM, ndctl must create these first.
fn choose_for_raw(volume: &PmVolumeConfig) -> Result<Chosen, InterfaceError> {
    match volume.interface {
        VolumeInterface::Auto | VolumeInterface::VirtioPmem => Ok(Chosen::VirtioPmem),
        VolumeInterface::Nvdimm => Ok(Chosen::Nvdimm),
        VolumeInterface::VirtioBlk => Err(InterfaceError::RawBlocks { name: volume.name.clone() }),
    }
}

/// Returns the volume with the interface that it gets in a running guest, also at later boots.
pub fn at_run_time(volume: PmVolumeConfig) -> Result<PmVolumeConfig, InterfaceError> {
    let interface = match (volume.interface, volume.format) {
        (VolumeInterface::Nvdimm, _) => {
            return Err(InterfaceError::NvdimmAtRunTime { name: volume.name });
        }
        (VolumeInterface::Auto, VolumeFormat::Btt) => VolumeInterface::VirtioBlk,
        (VolumeInterface::Auto, VolumeFormat::Raw) => VolumeInterface::VirtioPmem,
        (interface, _) => interface,
    };
    Ok(PmVolumeConfig { interface, ..volume })
}

/// Refuses more NVDIMMs than a guest may have.
pub fn check_count(chosen: &[Chosen]) -> Result<(), InterfaceError> {
    let count = chosen.iter().filter(|chosen| **chosen == Chosen::Nvdimm).count();
    if count > MAX_NVDIMMS { Err(InterfaceError::TooManyNvdimms { count }) } else { Ok(()) }
}

/// Refuses volumes with equal device ids. The id is derived from the volume's name, which is unique
/// only within its pool. `others` contains the ids of all other devices.
pub fn check_ids<'a>(
    volumes: impl Iterator<Item = (&'a PmVolumeConfig, Chosen)>,
    others: impl IntoIterator<Item = String>,
) -> Result<(), InterfaceError> {
    let mut ids: BTreeSet<String> = others.into_iter().collect();
    for (volume, chosen) in volumes {
        if let Some(id) = chosen.device_id(&volume.name)
            && !ids.insert(id.clone())
        {
            return Err(InterfaceError::SameId { name: volume.name.clone(), id });
        }
    }
    Ok(())
}

/// Refuses an interface that is unsafe on the pool. The pool's durability is known only after it
/// was opened.
///
/// The BTT driver and file systems flush through flush hints. But Linux treats every NVDIMM in the
/// NFIT as memory that is durable after a fence. It lets programs map a raw NVDIMM with MAP_SYNC,
/// and such programs flush only cache lines.
pub fn check_pool(
    volume: &PmVolumeConfig,
    chosen: Chosen,
    durability: Durability,
) -> Result<(), InterfaceError> {
    let fence_is_flush = durability != Durability::PageCache;
    let writes_raw = volume.format == VolumeFormat::Raw && !volume.readonly;
    if chosen == Chosen::Nvdimm && writes_raw && !fence_is_flush && !volume.force {
        return Err(InterfaceError::UnsafeRawNvdimm { name: volume.name.clone(), durability });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(options: &str) -> PmVolumeConfig {
        PmVolumeConfig::parse(&format!("pool=/p,name=data,{options}")).unwrap()
    }

    #[test]
    fn raw_volume_is_virtio_pmem_by_default() {
        for payload in [Payload::Linux, Payload::Unknown] {
            for vcpus in [1, 2, 64] {
                let chosen = |options| choose(&volume(options), &Allocation::Thick, vcpus, payload);
                assert_eq!(chosen("format=raw"), Ok(Chosen::VirtioPmem));
                assert_eq!(chosen("format=raw,interface=virtio-pmem"), Ok(Chosen::VirtioPmem));
                assert_eq!(chosen("format=raw,interface=nvdimm"), Ok(Chosen::Nvdimm));
            }
        }
    }

    #[test]
    fn raw_volume_is_refused_as_virtio_blk() {
        let text = choose(
            &volume("format=raw,interface=virtio-blk"),
            &Allocation::Thick,
            1,
            Payload::Linux,
        );
        let text = text.unwrap_err().to_string();
        for part in ["data", "interface=virtio-blk", "format=raw", "interface=virtio-pmem"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn writable_raw_nvdimm_needs_a_pool_with_fences_as_flushes() {
        use Durability::{DaxSync, PageCache, Volatile};
        let checked = |options, durability| {
            let volume = volume(options);
            let chosen = choose(&volume, &Allocation::Thick, 1, Payload::Linux).unwrap();
            check_pool(&volume, chosen, durability)
        };
        let raw = "format=raw,interface=nvdimm";
        let text = checked(raw, PageCache).unwrap_err().to_string();
        for part in ["data", "page-cache", "MAP_SYNC", "interface=virtio-pmem", "force=on"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!(text.lines().count(), 1);
        for (options, durability) in [
            (raw, DaxSync),
            (raw, Volatile),
            ("format=raw,interface=nvdimm,readonly=on", PageCache),
            ("format=raw,interface=nvdimm,force=on", PageCache),
            ("format=raw,interface=virtio-pmem", PageCache),
            ("format=raw", PageCache),
            ("format=btt,interface=nvdimm", PageCache),
        ] {
            assert_eq!(checked(options, durability), Ok(()), "{options} on {durability:?}");
        }
    }

    #[test]
    fn number_of_nvdimms_is_limited() {
        let mut chosen = vec![Chosen::Nvdimm; MAX_NVDIMMS];
        chosen.extend([Chosen::VirtioPmem; 3]);
        assert_eq!(check_count(&chosen), Ok(()));
        chosen.push(Chosen::Nvdimm);
        let text = check_count(&chosen).unwrap_err().to_string();
        assert!(text.contains("65 volumes") && text.contains("at most 64"), "{text}");
    }

    #[test]
    fn equal_device_ids_are_refused() {
        let disk = |pool: &str, name: &str| {
            PmVolumeConfig::parse(&format!("pool={pool},name={name},interface=virtio-blk")).unwrap()
        };
        let volumes = [disk("/p", "data"), disk("/q", "data")];
        let check = |chosen: [Chosen; 2], disks: &[&'static str]| {
            check_ids(volumes.iter().zip(chosen), disks.iter().map(ToString::to_string))
        };
        let text = check([Chosen::VirtioBlk; 2], &[]).unwrap_err().to_string();
        assert!(text.contains("name=data") && text.contains("pmvol volume rename"), "{text}");
        assert_eq!(check([Chosen::VirtioBlk, Chosen::Nvdimm], &[]), Ok(()));
        check([Chosen::VirtioBlk, Chosen::Nvdimm], &["root", "data"]).unwrap_err();
        assert_eq!(check([Chosen::Nvdimm; 2], &["data"]), Ok(()));
        assert_eq!(check([Chosen::VirtioPmem, Chosen::VirtioBlk], &[]), Ok(()));
        for (chosen, other) in
            [([Chosen::VirtioPmem; 2], ""), ([Chosen::VirtioPmem, Chosen::Nvdimm], "pmem-data")]
        {
            let text = check(chosen, &[other]).unwrap_err().to_string();
            assert!(text.contains("has the id pmem-data"), "{text}");
        }
    }

    #[test]
    fn choice_follows_the_table() {
        use Payload::{Linux, Unknown};
        use VolumeInterface::{Auto, Nvdimm, VirtioBlk, VirtioPmem};
        let chosen = |interface, vcpus, payload, force| {
            let volume = PmVolumeConfig { interface, force, ..volume("format=btt") };
            choose(&volume, &Allocation::Thick, vcpus, payload).ok()
        };
        assert_eq!(chosen(Auto, 1, Linux, false), Some(Chosen::Nvdimm));
        assert_eq!(chosen(Auto, 64, Linux, false), Some(Chosen::Nvdimm));
        assert_eq!(chosen(Auto, 1, Unknown, false), Some(Chosen::VirtioBlk));
        assert_eq!(chosen(Auto, 4, Unknown, false), Some(Chosen::VirtioBlk));
        assert_eq!(chosen(VirtioBlk, 4, Linux, false), Some(Chosen::VirtioBlk));
        assert_eq!(chosen(VirtioBlk, 1, Unknown, false), Some(Chosen::VirtioBlk));
        assert_eq!(chosen(Nvdimm, 4, Unknown, false), Some(Chosen::Nvdimm));
        assert_eq!(chosen(VirtioPmem, 1, Linux, false), Some(Chosen::VirtioPmem));
        assert_eq!(chosen(VirtioPmem, 2, Linux, false), None);
        assert_eq!(chosen(VirtioPmem, 2, Linux, true), Some(Chosen::VirtioPmem));
    }

    #[test]
    fn running_guest_gets_no_nvdimm() {
        use VolumeInterface::{VirtioBlk, VirtioPmem};
        for (options, expected) in [
            ("format=btt", VirtioBlk),
            ("format=raw", VirtioPmem),
            ("interface=virtio-pmem", VirtioPmem),
            ("interface=virtio-blk", VirtioBlk),
        ] {
            let interface = at_run_time(volume(options)).map(|volume| volume.interface);
            assert_eq!(interface, Ok(expected), "{options}");
        }
        let text = at_run_time(volume("interface=nvdimm")).unwrap_err().to_string();
        for part in ["data", "only at boot", "firmware tables", "interface=virtio-blk"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn thin_volume_is_mapped_if_its_holes_can_be_filled() {
        let chosen = |options: &str, overcommit, refusal: Option<&str>| {
            let refusal = refusal.map(str::to_owned);
            let allocation = Allocation::Thin { overcommit, refusal, excess: None };
            choose(&volume(options), &allocation, 1, Payload::Linux)
        };
        let overcommit = Some(Overcommit { reserve_bytes: 2 << 20, size_bytes: 20 << 20 });
        let (error, refusal) = (",on_full=error", Some("no such device"));
        let unfilled = [
            (error, overcommit, None, ["2 MiB of 20 MiB", "resize --reserve"]),
            (error, overcommit, refusal, ["2 MiB of 20 MiB", "on_full=pause"]),
            ("", overcommit, refusal, ["no such device", "convert --thick"]),
            ("", None, refusal, ["no such device", "convert --thick"]),
        ];
        for (options, mapped) in
            [("interface=auto", Chosen::Nvdimm), ("interface=virtio-blk", Chosen::VirtioBlk)]
        {
            for on_full in ["", error] {
                assert_eq!(chosen(&format!("{options}{on_full}"), None, None), Ok(mapped));
            }
            assert_eq!(chosen(options, overcommit, None), Ok(Chosen::VirtioBlk));
            for (on_full, overcommit, refusal, _) in unfilled {
                let options = format!("{options}{on_full}");
                assert_eq!(chosen(&options, overcommit, refusal), Ok(Chosen::VirtioBlk));
                let readonly = format!("{options},readonly=on");
                assert_eq!(chosen(&readonly, overcommit, refusal), Ok(mapped));
            }
        }
        for interface in [Chosen::Nvdimm, Chosen::VirtioPmem] {
            let options = format!("interface={},force=on", interface.name());
            assert_eq!(chosen(&options, None, None), Ok(interface));
            assert_eq!(chosen(&options, overcommit, None), Ok(interface));
            for (on_full, overcommit, refusal, reasons) in unfilled {
                let options = format!("{options}{on_full}");
                let readonly = format!("{options},readonly=on");
                assert_eq!(chosen(&readonly, overcommit, refusal), Ok(interface));
                let text = chosen(&options, overcommit, refusal).unwrap_err().to_string();
                let usual = ["data", interface.name(), "interface=virtio-blk"];
                for part in usual.into_iter().chain(reasons) {
                    assert!(text.contains(part), "{part} is not in {text}");
                }
            }
        }
        let excess = Some("it can need 9 mappings".to_owned());
        let large = Allocation::Thin { overcommit: None, refusal: None, excess };
        for options in ["interface=auto", "interface=auto,readonly=on"] {
            let auto = choose(&volume(options), &large, 1, Payload::Linux);
            assert_eq!(auto, Ok(Chosen::VirtioBlk), "{options}");
        }
        let thin = Allocation::Thin { overcommit: None, refusal: None, excess: None };
        choose(&volume("interface=virtio-pmem"), &thin, 2, Payload::Linux).unwrap_err();
        let auto = choose(&volume("interface=auto"), &thin, 2, Payload::Unknown);
        assert_eq!(auto, Ok(Chosen::VirtioBlk));
        let error = chosen("format=raw", None, None).unwrap_err();
        assert_eq!(error, InterfaceError::ThinRaw { name: "data".to_owned() });
    }

    #[test]
    fn refusal_names_volume_count_and_remedy() {
        let volume = volume("interface=virtio-pmem");
        let refused = choose(&volume, &Allocation::Thick, 2, Payload::Linux);
        let text = refused.unwrap_err().to_string();
        for part in ["data", "max=2", "spinlock", "interface=nvdimm", "force=on"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}

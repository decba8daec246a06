//! Sizes of a VM's volumes in one pool. They are decided before the pool is changed.
//!
//! Volumes of fixed sizes are allocated first, regardless of the order of the flags. A volume with
//! `size=remaining` uses the rest:
//!
//! ```text
//! usable = the pool - its own data - bad media
//! rest   = usable - all other volumes - sizes of the zones of --pm-memory
//! ```
//!
//! The pool never lends its reserve for volumes (STRG) as memory, so the zones must fit into
//! `usable - max(STRG, all volumes)`. If memory may borrow the space of thin volumes, only thick
//! volumes count here.

use foreshore_types::size::Size;
use pmem_volume::btt::MIN_VOLUME_BYTES;
use thiserror::Error;

use super::config::{PmVolumeConfig, VolumeSize};
use crate::pool::{CHUNK_BYTES, PoolInfo, VolumeFormat, VolumeInfo};

/// Change that a volume needs before it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The volume exists and keeps its size.
    Open,
    /// Create the volume with this size.
    Create(u64),
    /// Grow the volume to this size.
    Grow(u64),
}

/// Conflict between the volumes and the memory of a VM in one pool.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    /// The volume does not exist and may not be created.
    #[error("no such volume in the pool: {name:?}; create it with create=on and size=")]
    NoVolume { name: String },
    #[error("volume {name:?} has {}, but size= requests {}", Size(*size_bytes), Size(*wanted_bytes))]
    VolumeSize {
        name: String,
        size_bytes: u64,
        /// Configured size.
        wanted_bytes: u64,
    },
    #[error(
        "volume {name:?} is {found}, not {wanted}; attach it with format={found} (the default is btt)"
    )]
    VolumeFormat {
        name: String,
        found: VolumeFormat,
        /// Configured format.
        wanted: VolumeFormat,
    },
    #[error(
        "only one volume of a pool can have size=remaining, and volume {first:?} has it already"
    )]
    TwoRemaining {
        name: String,
        /// Name of the earlier volume in the configuration.
        first: String,
    },
    #[error(
        "volume {name:?} needs {}, but the pool has only {} left for it; grow the pool, or reserve less of thin volumes with reserve=",
        Size(*wanted_bytes), Size(*left_bytes)
    )]
    NoRoom {
        name: String,
        wanted_bytes: u64,
        /// Free bytes that remain after all volumes before this one.
        left_bytes: u64,
    },
    #[error(
        "volume {name:?} with size=remaining would have {}, but must have at least {}: {} of the pool are free, and the \
         zones of --pm-memory may need {}",
        Size(*remaining_bytes), Size(*least_bytes), Size(*free_bytes), Size(*memory_bytes)
    )]
    RemainingTooSmall {
        name: String,
        remaining_bytes: u64,
        /// Smallest size of a volume in this format.
        least_bytes: u64,
        /// Free bytes that remain after all volumes of fixed sizes were created.
        free_bytes: u64,
        /// Total size of the zones.
        memory_bytes: u64,
    },
    /// The pool can never lend as much memory as the zones may need.
    #[error(
        "zones may need {}, but the pool can lend at most {} of its {}: {} are metadata, and {} are reserved for \
         volumes (its reserve is {}, and all volumes have {})",
        Size(*memory_bytes), Size(self.max_memory_bytes()), Size(*total_bytes),
        Size(total_bytes - usable_bytes), Size(*reserve_bytes.max(volume_bytes)), Size(*reserve_bytes),
        Size(*volume_bytes)
    )]
    Promise {
        /// Total size of the zones.
        memory_bytes: u64,
        /// Size of the pool.
        total_bytes: u64,
        /// Size of the pool without its own data.
        usable_bytes: u64,
        reserve_bytes: u64,
        /// Total size of all volumes, including those that would be created.
        volume_bytes: u64,
    },
}

impl PlanError {
    /// Name of the refused volume. `None` if the zones are refused.
    pub fn volume(&self) -> Option<&str> {
        match self {
            Self::NoVolume { name }
            | Self::VolumeSize { name, .. }
            | Self::VolumeFormat { name, .. }
            | Self::TwoRemaining { name, .. }
            | Self::NoRoom { name, .. }
            | Self::RemainingTooSmall { name, .. } => Some(name),
            Self::Promise { .. } => None,
        }
    }

    /// Maximum number of bytes that the pool can lend as memory.
    fn max_memory_bytes(&self) -> u64 {
        match *self {
            Self::Promise { usable_bytes, reserve_bytes, volume_bytes, .. } => {
                usable_bytes.saturating_sub(reserve_bytes.max(volume_bytes))
            }
            _ => 0,
        }
    }
}

/// Returns the step for each of `volumes`, in their order. `pool` and `stored` describe the pool
/// that contains all of them. `memory_bytes` is the total size of the VM's zones in this pool.
pub fn plan(
    volumes: &[&PmVolumeConfig],
    stored: &[VolumeInfo],
    pool: &PoolInfo,
    memory_bytes: u64,
) -> Result<Vec<Step>, PlanError> {
    check_one_remaining(volumes)?;
    let mut steps =
        volumes.iter().map(|volume| step(volume, stored)).collect::<Result<Vec<_>, _>>()?;
    let mut free_bytes = pool.available_bytes();
    for (volume, step) in volumes.iter().zip(&steps) {
        if let Some(Step::Create(size_bytes)) = step {
            let wanted_bytes = volume.reserve.unwrap_or(*size_bytes);
            free_bytes = free_bytes.checked_sub(wanted_bytes).ok_or_else(|| PlanError::NoRoom {
                name: volume.name.clone(),
                wanted_bytes,
                left_bytes: free_bytes,
            })?;
        }
    }
    let new_bytes = pool.available_bytes() - free_bytes;
    let volume_bytes = pool.volume_bytes.max(pool.promised_bytes) + new_bytes;
    let never_lent_bytes = match pool.lends_promised() {
        true => thick_bytes(stored).saturating_add(new_thick_bytes(volumes, &steps)),
        false => volume_bytes - unguaranteed_bytes(stored),
    };
    check_promise(pool, memory_bytes, never_lent_bytes)?;
    let usable_bytes = pool.usable_bytes();
    // Memory that was lent before a reboot may not have been returned yet, so fewer bytes may be
    // free now than later.
    let rest_bytes =
        usable_bytes.saturating_sub(volume_bytes.saturating_add(memory_bytes)).min(free_bytes);
    let rest = Rest { rest_bytes: rest_bytes - rest_bytes % CHUNK_BYTES, free_bytes, memory_bytes };
    for (volume, slot) in volumes.iter().zip(&mut steps).filter(|(_, step)| step.is_none()) {
        *slot = Some(rest.step(volume, stored)?);
    }
    Ok(steps.into_iter().flatten().collect())
}

/// Checks that volume `name` may grow to `size_bytes` while the VM runs. Like [`plan`], leaves
/// `memory_bytes` for the VM's zones in this pool.
pub fn check_growth(
    (name, size_bytes): (&str, u64),
    stored: &[VolumeInfo],
    pool: &PoolInfo,
    memory_bytes: u64,
) -> Result<(), PlanError> {
    let found = stored.iter().find(|stored| stored.name == name);
    let found = found.ok_or_else(|| PlanError::NoVolume { name: name.to_owned() })?;
    // Growth of a volume that is guaranteed in part needs no space yet.
    let is_whole = found.reserve_bytes == found.size_bytes;
    let added_bytes = if is_whole { size_bytes.saturating_sub(found.size_bytes) } else { 0 };
    let left_bytes = pool.available_bytes();
    if added_bytes > left_bytes {
        let (name, wanted_bytes) = (name.to_owned(), added_bytes);
        return Err(PlanError::NoRoom { name, wanted_bytes, left_bytes });
    }
    let never_lent_bytes = match (pool.lends_promised(), found.thin) {
        (true, true) => thick_bytes(stored),
        (true, false) => thick_bytes(stored).saturating_add(added_bytes),
        (false, _) => {
            let volume_bytes = pool.volume_bytes.max(pool.promised_bytes);
            (volume_bytes - unguaranteed_bytes(stored)).saturating_add(added_bytes)
        }
    };
    check_promise(pool, memory_bytes, never_lent_bytes)
}

/// Checks that the pool can lend `memory_bytes` without `volume_bytes`, which it never lends.
fn check_promise(pool: &PoolInfo, memory_bytes: u64, volume_bytes: u64) -> Result<(), PlanError> {
    let PoolInfo { total_bytes, reserve_bytes, .. } = *pool;
    let usable_bytes = pool.usable_bytes();
    match memory_bytes <= usable_bytes.saturating_sub(reserve_bytes.max(volume_bytes)) {
        true => Ok(()),
        false => Err(PlanError::Promise {
            memory_bytes,
            total_bytes,
            usable_bytes,
            reserve_bytes,
            volume_bytes,
        }),
    }
}

/// Bytes that volumes use beyond what is guaranteed to them. They do not prevent a start of the VM,
/// because its guest could otherwise prevent it by writes. Its zones may then not get all memory.
fn unguaranteed_bytes(stored: &[VolumeInfo]) -> u64 {
    let beyond = |volume: &VolumeInfo| volume.allocated_bytes.saturating_sub(volume.reserve_bytes);
    stored.iter().map(beyond).sum()
}

/// Sizes of all thick volumes.
fn thick_bytes(stored: &[VolumeInfo]) -> u64 {
    let thick = stored.iter().filter(|stored| !stored.thin).map(|stored| stored.size_bytes);
    thick.fold(0, u64::saturating_add)
}

/// Sizes of the thick volumes that would be created.
fn new_thick_bytes(volumes: &[&PmVolumeConfig], steps: &[Option<Step>]) -> u64 {
    let new = volumes.iter().zip(steps).filter_map(|(volume, step)| match step {
        Some(Step::Create(size_bytes)) if !volume.creates_thin() => Some(*size_bytes),
        _ => None,
    });
    new.fold(0, u64::saturating_add)
}

fn check_one_remaining(volumes: &[&PmVolumeConfig]) -> Result<(), PlanError> {
    let mut remaining = volumes.iter().filter(|volume| volume.size == VolumeSize::Remaining);
    match (remaining.next(), remaining.next()) {
        (Some(first), Some(second)) => {
            Err(PlanError::TwoRemaining { name: second.name.clone(), first: first.name.clone() })
        }
        _ => Ok(()),
    }
}

/// Step for a volume whose size does not depend on the others. `None` for `size=remaining`.
fn step(volume: &PmVolumeConfig, stored: &[VolumeInfo]) -> Result<Option<Step>, PlanError> {
    let name = || volume.name.clone();
    let Some(found) = stored.iter().find(|stored| stored.name == volume.name) else {
        return match volume.size {
            VolumeSize::Bytes(size_bytes) if volume.create => Ok(Some(Step::Create(size_bytes))),
            VolumeSize::Remaining if volume.create => Ok(None),
            _ => Err(PlanError::NoVolume { name: name() }),
        };
    };
    let wanted = volume.format;
    if found.format != wanted {
        return Err(PlanError::VolumeFormat { name: name(), found: found.format, wanted });
    }
    match volume.size {
        VolumeSize::Bytes(wanted_bytes) if wanted_bytes != found.size_bytes => {
            Err(PlanError::VolumeSize { name: name(), size_bytes: found.size_bytes, wanted_bytes })
        }
        VolumeSize::Remaining if !volume.readonly => Ok(None),
        _ => Ok(Some(Step::Open)),
    }
}

/// Bytes that the volume with `size=remaining` may use.
struct Rest {
    rest_bytes: u64,
    free_bytes: u64,
    memory_bytes: u64,
}

impl Rest {
    fn step(&self, volume: &PmVolumeConfig, stored: &[VolumeInfo]) -> Result<Step, PlanError> {
        let Self { rest_bytes, free_bytes, memory_bytes } = *self;
        if let Some(found) = stored.iter().find(|stored| stored.name == volume.name) {
            // An overcommitted volume would take the same bytes at each start.
            let is_whole = found.reserve_bytes == found.size_bytes;
            return Ok(match rest_bytes {
                0 => Step::Open,
                _ if !is_whole => Step::Open,
                more => Step::Grow(found.size_bytes + more),
            });
        }
        let least_bytes = match volume.format {
            VolumeFormat::Btt => MIN_VOLUME_BYTES,
            VolumeFormat::Raw => CHUNK_BYTES,
        };
        if rest_bytes < least_bytes {
            return Err(PlanError::RemainingTooSmall {
                name: volume.name.clone(),
                remaining_bytes: rest_bytes,
                least_bytes,
                free_bytes,
                memory_bytes,
            });
        }
        Ok(Step::Create(rest_bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use uuid::Uuid;

    use super::*;
    use crate::pool::fake::empty_info;

    const MIB: u64 = 1 << 20;

    /// A pool of 1 GiB with a reserve of 128 MiB, in which volumes use `volume_bytes`.
    fn pool(volume_bytes: u64) -> PoolInfo {
        PoolInfo {
            total_bytes: 1024 * MIB,
            metadata_bytes: 4 * MIB,
            reserve_bytes: 128 * MIB,
            volume_bytes,
            free_bytes: 1000 * MIB - volume_bytes,
            scrubbing_bytes: 20 * MIB,
            ..empty_info()
        }
    }

    fn volume(options: &str) -> PmVolumeConfig {
        PmVolumeConfig::parse(&format!("pool=/p,{options}")).unwrap()
    }

    fn stored(name: &str, format: VolumeFormat, size_bytes: u64) -> VolumeInfo {
        let (name, uuid) = (name.to_owned(), Uuid::nil());
        VolumeInfo {
            name,
            uuid,
            format,
            size_bytes,
            reserve_bytes: size_bytes,
            allocated_bytes: size_bytes,
            extents: 1,
            thin: false,
        }
    }

    /// Plans `volumes` and zones of `memory_bytes` in a pool that already contains `stored`.
    fn planned(
        volumes: &[&str],
        stored: &[VolumeInfo],
        memory_bytes: u64,
    ) -> Result<Vec<Step>, PlanError> {
        let volumes: Vec<_> = volumes.iter().map(|options| volume(options)).collect();
        let volume_bytes = stored.iter().map(|stored| stored.size_bytes).sum();
        plan(&volumes.iter().collect::<Vec<_>>(), stored, &pool(volume_bytes), memory_bytes)
    }

    #[test]
    fn remaining_volume_leaves_the_sizes_of_all_zones() {
        let rest = "name=rest,size=remaining,create=on";
        assert_eq!(planned(&[rest], &[], 512 * MIB), Ok(vec![Step::Create(508 * MIB)]));
        assert_eq!(planned(&[rest], &[], 0), Ok(vec![Step::Create(1020 * MIB)]));
        // On the second boot, the volume exists, and the pool has no space to grow it.
        let found = [stored("rest", VolumeFormat::Btt, 508 * MIB)];
        for rest in [rest, "name=rest,size=remaining"] {
            assert_eq!(planned(&[rest], &found, 512 * MIB), Ok(vec![Step::Open]));
        }
    }

    #[test]
    fn zones_may_overlap_thin_volumes_if_their_space_is_lent() {
        let thin = VolumeInfo { thin: true, ..stored("thin", VolumeFormat::Btt, 500 * MIB) };
        let stored = [thin, stored("thick", VolumeFormat::Btt, 200 * MIB)];
        let volumes = ["name=thin", "name=new,size=100M,create=on,thin=on"].map(volume);
        let volumes: Vec<_> = volumes.iter().collect();
        let planned = |lends_promised, memory_mib: u64| {
            let promised_bytes = 700 * MIB;
            let min_free_bytes = bool::then_some(lends_promised, 0);
            let pool = PoolInfo { min_free_bytes, promised_bytes, ..pool(300 * MIB) };
            plan(&volumes, &stored, &pool, memory_mib * MIB).map(drop)
        };
        assert_eq!(planned(true, 820), Ok(()));
        assert!(matches!(planned(true, 822), Err(PlanError::Promise { .. })));
        assert_eq!(planned(false, 220), Ok(()));
        assert!(matches!(planned(false, 222), Err(PlanError::Promise { .. })));
    }

    #[test]
    fn growth_leaves_the_sizes_of_all_zones() {
        let thick = [stored("a", VolumeFormat::Btt, 100 * MIB)];
        let thin = [VolumeInfo { thin: true, ..thick[0].clone() }];
        let check = |stored, lends_promised, size_mib: u64, memory_mib: u64| {
            let min_free_bytes = bool::then_some(lends_promised, 0);
            let pool = PoolInfo { min_free_bytes, ..pool(100 * MIB) };
            check_growth(("a", size_mib * MIB), stored, &pool, memory_mib * MIB)
        };
        for (stored, lends_promised) in [(&thick, false), (&thin, false), (&thick, true)] {
            assert_eq!(check(stored, lends_promised, 508, 512), Ok(()));
            let error = check(stored, lends_promised, 510, 512).unwrap_err();
            assert!(
                matches!(error, PlanError::Promise { volume_bytes, .. } if volume_bytes == 510 * MIB)
            );
        }
        // Memory may borrow the space of a thin volume.
        assert_eq!(check(&thin, true, 1000, 512), Ok(()));
        let left_bytes = 920 * MIB;
        for stored in [&thick, &thin] {
            let error = check(stored, true, 1022, 0).unwrap_err();
            let (name, wanted_bytes) = ("a".to_owned(), 922 * MIB);
            assert_eq!(error, PlanError::NoRoom { name, wanted_bytes, left_bytes });
        }
        // Growth of an overcommitted volume needs no space.
        let overcommitted = [VolumeInfo { reserve_bytes: 2 * MIB, ..thin[0].clone() }];
        assert_eq!(check(&overcommitted, false, 1 << 20, 512), Ok(()));
        // The pool itself refuses to shrink a BTT.
        assert_eq!(check(&thick, false, 50, 512), Ok(()));
    }

    #[test]
    fn overcommitted_volume_never_prevents_a_start() {
        let whole = stored("a", VolumeFormat::Btt, 600 * MIB);
        let partly = VolumeInfo { thin: true, reserve_bytes: 100 * MIB, ..whole.clone() };
        assert!(planned(&["name=a"], slice::from_ref(&whole), 512 * MIB).is_err());
        assert_eq!(planned(&["name=a"], slice::from_ref(&partly), 512 * MIB), Ok(vec![Step::Open]));
        assert!(planned(&["name=a"], slice::from_ref(&partly), 1000 * MIB).is_err());
        // It would grow by the same bytes at each start.
        let rest = "name=a,size=remaining";
        assert_eq!(planned(&[rest], &[partly], 0), Ok(vec![Step::Open]));
        assert_eq!(planned(&[rest], &[whole], 0), Ok(vec![Step::Grow(1020 * MIB)]));
    }

    #[test]
    fn new_volume_needs_only_its_reserve() {
        let planned = |reserve: &str, memory_mib| {
            let volume = volume(&format!("name=a,size=4T,create=on,thin=on,reserve={reserve}"));
            plan(&[&volume], &[], &pool(0), memory_mib * MIB)
        };
        assert_eq!(planned("420M", 600), Ok(vec![Step::Create(4 << 40)]));
        assert!(matches!(planned("420M", 602), Err(PlanError::Promise { .. })));
        let error = planned("2T", 0).unwrap_err();
        assert!(error.to_string().contains("needs 2 TiB"), "{error}");
        assert!(matches!(error, PlanError::NoRoom { .. }));
    }

    #[test]
    fn order_of_flags_does_not_matter() {
        let (rest, fixed) = ("name=rest,size=remaining,create=on", "name=a,size=100M,create=on");
        let (rest_step, fixed_step) = (Step::Create(408 * MIB), Step::Create(100 * MIB));
        assert_eq!(
            planned(&[rest, fixed], &[], 512 * MIB),
            Ok(vec![rest_step.clone(), fixed_step.clone()])
        );
        assert_eq!(planned(&[fixed, rest], &[], 512 * MIB), Ok(vec![fixed_step, rest_step]));
    }

    #[test]
    fn existing_volume_grows_by_the_rest_and_never_shrinks() {
        let found = [
            stored("rest", VolumeFormat::Btt, 408 * MIB),
            stored("b", VolumeFormat::Raw, 20 * MIB),
        ];
        let rest = "name=rest,size=remaining";
        assert_eq!(planned(&[rest], &found, 512 * MIB), Ok(vec![Step::Grow(488 * MIB)]));
        assert_eq!(
            planned(&["name=rest,size=remaining,readonly=on"], &found, 0),
            Ok(vec![Step::Open])
        );
        assert_eq!(planned(&["name=rest"], &found, 0), Ok(vec![Step::Open]));
        let error = planned(&[rest], &found, 594 * MIB).unwrap_err();
        assert_eq!(error.volume(), None);
        let text = error.to_string();
        for part in ["594 MiB", "592 MiB", "1 GiB", "4 MiB", "428 MiB", "128 MiB"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn zones_and_volumes_of_any_kind_must_fit_together() {
        // Counts existing volumes, volumes to create, and the unused part of the reserve.
        let other = [stored("other", VolumeFormat::Raw, 508 * MIB)];
        assert!(planned(&[], &other, 512 * MIB).is_ok());
        assert!(matches!(planned(&[], &other, 514 * MIB), Err(PlanError::Promise { .. })));
        let fixed = "name=a,size=300M,create=on";
        assert!(planned(&[fixed], &[], 720 * MIB).is_ok());
        assert!(matches!(planned(&[fixed], &[], 722 * MIB), Err(PlanError::Promise { .. })));
        assert!(planned(&[], &[], 892 * MIB).is_ok());
        assert!(matches!(planned(&[], &[], 894 * MIB), Err(PlanError::Promise { .. })));
        assert!(matches!(planned(&[], &[], u64::MAX), Err(PlanError::Promise { .. })));
    }

    #[test]
    fn remaining_is_at_least_a_volume() {
        for (format, least) in [("btt", 18), ("raw", 2)] {
            let rest = format!("name=rest,size=remaining,create=on,format={format}");
            let other = [stored("other", VolumeFormat::Raw, 508 * MIB)];
            assert!(planned(&[&rest], &other, (512 - least) * MIB).is_ok());
            let error = planned(&[&rest], &other, (514 - least) * MIB).unwrap_err();
            assert_eq!(error.volume(), Some("rest"));
            let text = error.to_string();
            let numbers = [least - 2, 512, 514 - least].map(|mib| Size(mib * MIB).to_string());
            for part in numbers.iter().chain([&format!("at least {least} MiB")]) {
                assert!(text.contains(part.as_str()), "{part} is not in {text}");
            }
        }
    }

    #[test]
    fn impossible_volume_is_refused_with_its_name() {
        let found =
            [stored("a", VolumeFormat::Btt, 20 * MIB), stored("r", VolumeFormat::Raw, 20 * MIB)];
        for (volumes, refused, parts) in [
            (&["name=b"][..], "b", &["no such volume in the pool: \"b\"", "create=on"][..]),
            (&["name=b,size=2M"], "b", &["no such volume in the pool: \"b\""]),
            (&["name=b,size=remaining"], "b", &["no such volume in the pool: \"b\""]),
            (&["name=a,size=8M"], "a", &["20 MiB", "8 MiB"]),
            (&["name=a,size=8M,create=on"], "a", &["20 MiB", "8 MiB"]),
            (&["name=a,format=raw"], "a", &["is btt, not raw", "format=btt"]),
            (&["name=r,format=btt"], "r", &["is raw, not btt", "format=raw"]),
            (&["name=r,size=20M,create=on"], "r", &["is raw, not btt"]),
            (
                &["name=b,size=600M,create=on", "name=c,size=500M,create=on"],
                "c",
                &["500 MiB", "380 MiB"],
            ),
            (&["name=a,size=remaining", "name=c,size=remaining,create=on"], "c", &["\"a\""]),
        ] {
            let error = planned(volumes, &found, 0).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.volume(), Some(refused), "{text}");
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}

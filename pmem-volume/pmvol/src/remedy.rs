//! Commands and flags of pmvol that resolve an error of the library. The library names neither.

use pmem_volume::PoolError;
use pmem_volume::btt::EngineError;
use pmem_volume::btt_file::BttFileError;
use pmem_volume::pool::SplitError;

use super::commands::HoldsData;

/// Returns a clause to print behind the error.
pub(crate) fn of(error: &anyhow::Error) -> Option<&'static str> {
    if let Some(error) = error.downcast_ref() {
        return of_pool(error);
    }
    if let Some(HoldsData { .. }) = error.downcast_ref() {
        return Some("--force deletes it with its data");
    }
    if let Some(BttFileError::Pool { .. }) = error.downcast_ref() {
        return Some("name one of its volumes, without --file");
    }
    match error.downcast_ref()? {
        EngineError::Ambiguous { .. } => Some("`pmvol btt export` copies out what can be read"),
        _ => None,
    }
}

fn of_pool(error: &PoolError) -> Option<&'static str> {
    Some(match error {
        PoolError::Missing { .. } | PoolError::NotAPool { .. } => "`pmvol create` makes a pool",
        PoolError::DeviceReadOnly { .. } => "`pmvol info` and `pmvol check` can read it",
        PoolError::InUse { .. } => "`pmvol info` can read it meanwhile",
        PoolError::DeviceNotEmpty { .. } => "--force makes a pool there and erases the device",
        PoolError::DeviceGrowthNotEmpty { .. } => "--force takes it and erases its content",
        PoolError::DeviceUnknownVolumes { .. }
        | PoolError::SuperblocksDamaged { .. }
        | PoolError::Damaged { .. } => "see `pmvol check` and `pmvol repair`",
        PoolError::VolumeUnusable { .. } => "see `pmvol check`",
        PoolError::PoolFull { .. } => "`pmvol grow` makes it larger",
        PoolError::NoSuchVolume { .. } => "`pmvol volume create` makes one",
        PoolError::VolumeLacksNothing { .. } => "`pmvol volume delete` deletes it",
        PoolError::ShrinkRefused { .. } => "--shrink allows it",
        PoolError::Split { reason: SplitError::HoldsData, .. } => {
            "--force splits it anyway and erases its content"
        }
        _ => return None,
    })
}

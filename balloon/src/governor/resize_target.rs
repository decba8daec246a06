//! Sizes that a client requests of a zone.

use foreshore_types::size::Size;
use thiserror::Error;

use crate::{DriverState, ZoneId, ZoneSizes};

/// Size in bytes that a zone can have: whole blocks within its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizeTarget {
    zone: ZoneId,
    size_bytes: u64,
}

/// Reason why a zone cannot have a size.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ResizeTargetError {
    /// The region is smaller.
    #[error("{} is above the maximum of {}", Size(*size_bytes), Size(*max_bytes))]
    TooLarge {
        /// Requested size.
        size_bytes: u64,
        /// Size of the region.
        max_bytes: u64,
    },
    /// The size is not whole blocks.
    #[error("{} is not a multiple of its block size, {}", Size(*size_bytes), Size(*block_bytes))]
    NotMultiple {
        /// Requested size.
        size_bytes: u64,
        /// Size of a block.
        block_bytes: u64,
    },
    /// The device has refused the guest's driver.
    #[error("{}", crate::UNSUPPORTED_DRIVER)]
    UnsupportedDriver,
}

impl ResizeTarget {
    /// Checks that `zone` can have `size_bytes`.
    pub fn parse(zone: &ZoneSizes, size_bytes: u64) -> Result<Self, ResizeTargetError> {
        let ZoneSizes { id, max_bytes, block_bytes, .. } = *zone;
        if size_bytes > max_bytes {
            return Err(ResizeTargetError::TooLarge { size_bytes, max_bytes });
        }
        if !size_bytes.is_multiple_of(block_bytes) {
            return Err(ResizeTargetError::NotMultiple { size_bytes, block_bytes });
        }
        let target = Self { zone: id, size_bytes };
        if !target.has_driver(zone) {
            return Err(ResizeTargetError::UnsupportedDriver);
        }
        Ok(target)
    }

    /// Returns false if the device has refused the driver that the size needs. Unlike the bounds,
    /// the driver can change at any time.
    pub fn has_driver(&self, zone: &ZoneSizes) -> bool {
        zone.driver != DriverState::Unsupported || self.size_bytes == zone.plugged_bytes
    }

    /// Zone to resize.
    pub fn zone(&self) -> ZoneId {
        self.zone
    }

    /// Requested size.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tier;

    const MIB: u64 = 1 << 20;

    #[test]
    fn target_is_whole_blocks_within_the_region() {
        let zone = ZoneSizes::empty(1, Tier::Pm, 64 * MIB);
        for size_bytes in [0, 2 * MIB, 64 * MIB] {
            let target = ResizeTarget::parse(&zone, size_bytes).unwrap();
            assert_eq!((target.zone(), target.size_bytes()), (ZoneId(1), size_bytes));
        }
        let max_bytes = 64 * MIB;
        for size_bytes in [max_bytes + 1, max_bytes + 2 * MIB, u64::MAX] {
            let too_large = ResizeTargetError::TooLarge { size_bytes, max_bytes };
            assert_eq!(ResizeTarget::parse(&zone, size_bytes), Err(too_large));
        }
        for size_bytes in [1, MIB, max_bytes - 1] {
            let odd = ResizeTargetError::NotMultiple { size_bytes, block_bytes: 2 * MIB };
            assert_eq!(ResizeTarget::parse(&zone, size_bytes), Err(odd));
        }
    }

    #[test]
    fn zone_with_unsupported_driver_can_only_have_its_plugged_size() {
        let mut zone = ZoneSizes::empty(0, Tier::Pm, 64 * MIB);
        let ready = ResizeTarget::parse(&zone, 2 * MIB).unwrap();
        (zone.driver, zone.plugged_bytes) = (DriverState::Unsupported, 4 * MIB);
        assert!(ResizeTarget::parse(&zone, 4 * MIB).is_ok());
        let refused = Err(ResizeTargetError::UnsupportedDriver);
        assert_eq!(ResizeTarget::parse(&zone, 2 * MIB), refused);
        assert!(!ready.has_driver(&zone));
    }
}

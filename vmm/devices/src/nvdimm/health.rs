//! Health of NVDIMMs. A page contains one register for each NVDIMM, which the `_DSM` method of the
//! ACPI device reads (acpi/nfit.rs).

use std::fmt;

use crate::bus::BusDevice;
use crate::memory::layout::NVDIMM_HEALTH_REGISTER_LEN;

/// Health of an NVDIMM, as reported to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Flushes are durable.
    Ok,
    /// A flush or another write to the pool has failed.
    NotDurable,
}

impl Health {
    /// Bits that Get Health Information returns ("_DSM for Virtual NVDIMMs", function 1). ndctl
    /// reports each of the first two bits as "critical".
    fn register(self) -> u32 {
        match self {
            Self::Ok => 0,
            Self::NotDurable => 1 << 0,
        }
    }
}

/// Returns the current health of one NVDIMM.
pub type Source = Box<dyn Fn() -> Health + Send + Sync>;

/// Health registers, in the order of the NVDIMMs.
pub struct HealthRegisters(Vec<Source>);

impl HealthRegisters {
    /// Creates registers that call `sources` when they are read.
    pub fn new(sources: Vec<Source>) -> Self {
        Self(sources)
    }
}

impl fmt::Debug for HealthRegisters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HealthRegisters").field(&self.0.len()).finish()
    }
}

impl BusDevice for HealthRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let index = usize::try_from(offset / NVDIMM_HEALTH_REGISTER_LEN).unwrap_or(usize::MAX);
        let is_register = offset.is_multiple_of(NVDIMM_HEALTH_REGISTER_LEN);
        match (<&mut [u8; 4]>::try_from(&mut *data), self.0.get(index)) {
            (Ok(register), Some(source)) if is_register => {
                *register = source().register().to_le_bytes()
            }
            // The access is not of a whole register. Drivers make no such accesses.
            _ => data.fill(0),
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn register_reads_query_their_own_nvdimm() {
        let failed: Arc<[AtomicBool; 2]> = Arc::default();
        let source = |index: usize| -> Source {
            let failed = Arc::clone(&failed);
            Box::new(move || match failed[index].load(Ordering::Relaxed) {
                true => Health::NotDurable,
                false => Health::Ok,
            })
        };
        let registers = HealthRegisters::new(vec![source(0), source(1)]);
        let read = |offset| {
            let mut data = [0xff; 4];
            registers.read(offset, &mut data);
            u32::from_le_bytes(data)
        };
        assert_eq!([read(0), read(4)], [0, 0]);
        failed[1].store(true, Ordering::Relaxed);
        assert_eq!([read(0), read(4)], [0, 1]);
        // Offsets after the last register, between two registers, and elsewhere.
        for offset in [8, 2, 5, 0xffc, u64::MAX] {
            assert_eq!(read(offset), 0, "{offset:#x}");
        }
        let mut long = [0xff; 8];
        registers.read(4, &mut long);
        assert_eq!(long, [0; 8]);
        registers.write(4, &[0; 4]);
        assert_eq!(read(4), 1);
    }
}

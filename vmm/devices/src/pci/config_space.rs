//! Configuration space of a function with a type 0 header (PCI Local Bus 3.0, 6.1).

/// Size of the configuration space of a function without extended capabilities. The rest of its
/// ECAM page reads as zero.
const SIZE: usize = 256;
/// Offset of the first capability, directly after the header.
const FIRST_CAPABILITY: usize = 0x40;
/// Number of BARs in a type 0 header.
const BARS: usize = 6;

const VENDOR_ID: usize = 0x00;
const DEVICE_ID: usize = 0x02;
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION_ID: usize = 0x08;
const CLASS_CODE: usize = 0x09;
const CACHE_LINE_SIZE: usize = 0x0c;
const LATENCY_TIMER: usize = 0x0d;
const BAR0: usize = 0x10;
const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
const SUBSYSTEM_ID: usize = 0x2e;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;

const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
const STATUS_CAPABILITIES: u16 = 1 << 4;

/// End of the header registers that affect the addresses of BARs.
pub(super) const BARS_END: u16 = (BAR0 + 4 * BARS) as u16;

/// Identification registers of a function.
#[derive(Clone, Copy, Debug)]
pub struct FunctionIds {
    pub vendor: u16,
    /// Device ID, which is unique for the vendor.
    pub device: u16,
    pub revision: u8,
    /// Base class, subclass, programming interface: 24 bits.
    pub class: u32,
    pub subsystem_vendor: u16,
    pub subsystem: u16,
}

/// Memory BAR, with the address that the guest has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarRange {
    /// Index of the BAR in the header.
    pub bar: u8,
    pub base: u64,
    /// Length in bytes, a power of two.
    pub len: u64,
}

/// Registers of a function, with a mask of the bits that the guest may change.
pub struct ConfigSpace {
    bytes: [u8; SIZE],
    writable: [u8; SIZE],
    bar_len: [Option<u32>; BARS],
    /// Offset of the last link, where the offset of the next capability will be stored.
    last_link: usize,
    /// Offset at which the next capability will be added.
    free: usize,
}

impl ConfigSpace {
    /// Creates the configuration space of a function without BARs and capabilities.
    pub fn new(ids: &FunctionIds) -> Self {
        let mut this = Self {
            bytes: [0; SIZE],
            writable: [0; SIZE],
            bar_len: [None; BARS],
            last_link: CAPABILITIES,
            free: FIRST_CAPABILITY,
        };
        this.set(VENDOR_ID, &ids.vendor.to_le_bytes());
        this.set(DEVICE_ID, &ids.device.to_le_bytes());
        this.set(REVISION_ID, &[ids.revision]);
        this.set(CLASS_CODE, &ids.class.to_le_bytes()[..3]);
        this.set(SUBSYSTEM_VENDOR_ID, &ids.subsystem_vendor.to_le_bytes());
        this.set(SUBSYSTEM_ID, &ids.subsystem.to_le_bytes());
        let command = COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_INTX_DISABLE;
        this.allow(COMMAND, &command.to_le_bytes());
        // These registers have no effect, but software expects to read back the values that it
        // writes.
        this.allow(CACHE_LINE_SIZE, &[0xff]);
        this.allow(LATENCY_TIMER, &[0xff]);
        this.allow(INTERRUPT_LINE, &[0xff]);
        this
    }

    /// Adds a non-prefetchable 32-bit memory BAR of `len` bytes.
    ///
    /// # Panics
    /// If the BAR does not exist or is in use, or if `len` is not a power of two of at least 16.
    pub fn add_bar(&mut self, bar: u8, len: u32) {
        assert!(len.is_power_of_two() && len >= 16, "{len:#x} bytes are not a valid BAR size");
        assert!(self.bar_len[usize::from(bar)].replace(len).is_none(), "BAR {bar} was added twice");
        // Address bits below the size are always zero. Software uses this to determine the size.
        self.allow(BAR0 + 4 * usize::from(bar), &(!(len - 1)).to_le_bytes());
    }

    /// Appends a capability and returns its offset. `body` follows the ID and the link. `writable`
    /// is a mask of the bits in `body` that the guest may change.
    ///
    /// # Panics
    /// If the configuration space has no room left.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> u16 {
        let at = self.free;
        assert!(at + 2 + body.len() <= SIZE, "no room for capability {id:#x}");
        self.set(self.last_link, &[at as u8]);
        self.set(at, &[id, 0]);
        self.set(at + 2, body);
        self.allow(at + 2, writable);
        self.set(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.last_link = at + 1;
        self.free = (at + 2 + body.len()).next_multiple_of(4);
        at as u16
    }

    /// Reads any number of bytes. Bytes beyond the end are zero.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        for (at, byte) in (usize::from(offset)..).zip(data) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// Writes to the bits that the guest may change.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        for (at, new) in (usize::from(offset)..SIZE).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | new & mask;
        }
    }

    /// Memory BARs. Empty if memory decoding is off.
    pub fn decoded_bars(&self) -> Vec<BarRange> {
        if u16::from_le_bytes(self.get(COMMAND)) & COMMAND_MEMORY == 0 {
            return Vec::new();
        }
        let range = |(bar, len): (usize, &Option<u32>)| {
            let base = u32::from_le_bytes(self.get(BAR0 + 4 * bar));
            len.map(|len| BarRange { bar: bar as u8, base: base.into(), len: len.into() })
        };
        self.bar_len.iter().enumerate().filter_map(range).collect()
    }

    /// Returns true if the function may access memory, which includes sending MSIs (6.2.2).
    pub fn is_bus_master(&self) -> bool {
        u16::from_le_bytes(self.get(COMMAND)) & COMMAND_BUS_MASTER != 0
    }

    /// Reads `N` bytes at `at`. The range must be within the 256 bytes.
    pub fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        self.bytes[at..at + N].try_into().expect("a slice of that length")
    }

    fn set(&mut self, at: usize, value: &[u8]) {
        self.bytes[at..at + value.len()].copy_from_slice(value);
    }

    fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        let ids = FunctionIds {
            vendor: 0x1af4,
            device: 0x1044,
            revision: 1,
            class: 0x00_ff_00,
            subsystem_vendor: 0x1af4,
            subsystem: 0x40,
        };
        ConfigSpace::new(&ids)
    }

    fn read_u32(space: &ConfigSpace, offset: u16) -> u32 {
        let mut data = [0; 4];
        space.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn header_identifies_the_function_and_is_read_only() {
        let mut space = space();
        for offset in [0, 8, 0x2c] {
            space.write(offset, &[0xff; 4]);
        }
        assert_eq!(read_u32(&space, 0), 0x1044_1af4);
        assert_eq!(read_u32(&space, 8), 0x00ff_0001);
        assert_eq!(read_u32(&space, 0x2c), 0x0040_1af4);
    }

    #[test]
    fn bar_reports_its_size_and_decodes_at_its_address() {
        let mut space = space();
        space.add_bar(0, 0x8000);
        space.write(0x10, &[0xff; 4]);
        assert_eq!(read_u32(&space, 0x10), 0xffff_8000);
        space.write(0x14, &[0xff; 4]);
        assert_eq!(read_u32(&space, 0x14), 0, "a missing BAR has no writable bits");

        space.write(0x10, &0xc001_0000u32.to_le_bytes());
        assert_eq!(space.decoded_bars(), []);
        space.write(4, &2u16.to_le_bytes());
        assert_eq!(space.decoded_bars(), [BarRange { bar: 0, base: 0xc001_0000, len: 0x8000 }]);
    }

    #[test]
    fn capabilities_form_a_list_on_dword_boundaries() {
        let mut space = space();
        assert_eq!(read_u32(&space, 4) >> 16 & 0x10, 0);
        let first = space.add_capability(0x11, &[1, 2, 3], &[0, 0, 0xf0]);
        let second = space.add_capability(0x09, &[4], &[]);
        assert_eq!((first, second), (0x40, 0x48));
        assert_eq!(read_u32(&space, 4) >> 16 & 0x10, 0x10);
        assert_eq!(read_u32(&space, 0x34), 0x40);
        assert_eq!(read_u32(&space, 0x40), 0x0201_4811);
        assert_eq!(read_u32(&space, 0x48), 0x0004_0009);
        space.write(0x44, &[0xaf]);
        assert_eq!(read_u32(&space, 0x44), 0xa3);
    }

    #[test]
    fn accesses_at_and_beyond_the_end_are_harmless() {
        let mut space = space();
        space.write(0xfe, &[0xff; 4]);
        space.write(0xffc, &[0xff; 4]);
        space.write(0xffff, &[0xff; 8]);
        assert_eq!(read_u32(&space, 0xfe), 0);
        assert_eq!(read_u32(&space, 0xffff), 0);
    }
}

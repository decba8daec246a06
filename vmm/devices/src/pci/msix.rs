//! MSI-X (PCI Local Bus 3.0, 6.8.2): capability, table and pending bits. This module does not
//! deliver messages.

pub(crate) const CAPABILITY_ID: u8 = 0x11;
/// Offset of message control in the capability.
pub(crate) const CONTROL_OFFSET: u16 = 2;
/// Size of a table entry in bytes.
pub(crate) const ENTRY_LEN: u64 = 16;
/// Maximum number of vectors that the 11-bit size field can express.
pub(crate) const MAX_VECTORS: u16 = 2048;

const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
const CONTROL_ENABLE: u16 = 1 << 15;
const VECTOR_MASKED: u32 = 1;

/// Message: a memory write that raises an interrupt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    pub address: u64,
    pub data: u32,
}

/// Returns the body of the capability, which follows its ID and link, and a mask of the bits that
/// the guest may change.
///
/// Table and pending bits are in BAR `bar`, at offsets that are multiples of 8.
pub(crate) fn capability(
    vectors: u16,
    bar: u8,
    table_offset: u32,
    pba_offset: u32,
) -> ([u8; 10], [u8; 2]) {
    assert!(vectors > 0 && vectors <= MAX_VECTORS && bar < 6);
    assert!(table_offset.is_multiple_of(8) && pba_offset.is_multiple_of(8));
    let mut body = [0; 10];
    body[..2].copy_from_slice(&(vectors - 1).to_le_bytes());
    body[2..6].copy_from_slice(&(table_offset | u32::from(bar)).to_le_bytes());
    body[6..].copy_from_slice(&(pba_offset | u32::from(bar)).to_le_bytes());
    (body, (CONTROL_ENABLE | CONTROL_FUNCTION_MASK).to_le_bytes())
}

#[derive(Clone, Copy)]
struct Entry {
    address: u64,
    data: u32,
    control: u32,
}

impl Entry {
    fn bytes(&self) -> [u8; ENTRY_LEN as usize] {
        let mut bytes = [0; ENTRY_LEN as usize];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.data.to_le_bytes());
        bytes[12..].copy_from_slice(&self.control.to_le_bytes());
        bytes
    }

    fn set_dword(&mut self, index: u64, value: u32) {
        match index {
            // Messages are dwords, so the two lowest address bits are always zero.
            0 => self.address = self.address & !0xffff_ffff | u64::from(value & !3),
            1 => self.address = self.address & 0xffff_ffff | u64::from(value) << 32,
            2 => self.data = value,
            _ => self.control = value & VECTOR_MASKED,
        }
    }
}

/// Vectors of a function, with their messages, masks and pending bits.
pub(crate) struct MsixTable {
    entries: Vec<Entry>,
    pending: Vec<u64>,
    enabled: bool,
    function_masked: bool,
    bus_master: bool,
}

impl MsixTable {
    /// Creates a table of `vectors` masked vectors, which is the state after a reset.
    pub(crate) fn new(vectors: u16) -> Self {
        let entry = Entry { address: 0, data: 0, control: VECTOR_MASKED };
        Self {
            entries: vec![entry; vectors.into()],
            pending: vec![0; usize::from(vectors).div_ceil(64)],
            enabled: false,
            function_masked: false,
            bus_master: false,
        }
    }

    /// Returns true if the guest has enabled MSI-X.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Sets message control to the guest's value. The caller must then deliver the messages of
    /// [`Self::take_ready`].
    pub(crate) fn set_control(&mut self, control: u16) {
        self.enabled = control & CONTROL_ENABLE != 0;
        self.function_masked = control & CONTROL_FUNCTION_MASK != 0;
    }

    /// Sets the bus master bit. It matters because a message is a memory write (6.8.3). The caller
    /// must then deliver the messages of [`Self::take_ready`].
    pub(crate) fn set_bus_master(&mut self, bus_master: bool) {
        self.bus_master = bus_master;
    }

    pub(crate) fn read_table(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            let entry = self.entries.get((at / ENTRY_LEN) as usize);
            *byte = entry.map_or(0, |entry| entry.bytes()[(at % ENTRY_LEN) as usize]);
        }
    }

    /// Writes to the table. The caller must then deliver the messages of [`Self::take_ready`].
    ///
    /// Software must write aligned dwords or qwords (6.8.2). All other writes are ignored.
    pub(crate) fn write_table(&mut self, offset: u64, data: &[u8]) {
        if !matches!(data.len(), 4 | 8) || !offset.is_multiple_of(data.len() as u64) {
            return;
        }
        for (at, dword) in (offset..).step_by(4).zip(data.chunks_exact(4)) {
            if let Some(entry) = self.entries.get_mut((at / ENTRY_LEN) as usize) {
                let value = u32::from_le_bytes(dword.try_into().expect("four bytes"));
                entry.set_dword(at % ENTRY_LEN / 4, value);
            }
        }
    }

    pub(crate) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            let word = self.pending.get((at / 8) as usize).copied().unwrap_or(0);
            *byte = word.to_le_bytes()[(at % 8) as usize];
        }
    }

    /// Raises `vector`. Returns the message to send now, or `None` if the vector is now pending,
    /// MSI-X is off, or the vector does not exist.
    pub(crate) fn raise(&mut self, vector: u16) -> Option<MsiMessage> {
        if !self.enabled || usize::from(vector) >= self.entries.len() {
            return None;
        }
        if self.is_masked(vector) {
            self.pending[usize::from(vector / 64)] |= 1 << (vector % 64);
            return None;
        }
        Some(self.message(vector))
    }

    /// Message of `vector`, if it may be sent now.
    pub(crate) fn deliverable(&self, vector: u16) -> Option<MsiMessage> {
        let exists = self.enabled && usize::from(vector) < self.entries.len();
        (exists && !self.is_masked(vector)).then(|| self.message(vector))
    }

    /// Removes and returns the pending vectors that are no longer masked, with their messages.
    pub(crate) fn take_ready(&mut self) -> Vec<(u16, MsiMessage)> {
        if !self.enabled || self.pending.iter().all(|word| *word == 0) {
            return Vec::new();
        }
        let mut ready = Vec::new();
        for vector in 0..self.entries.len() as u16 {
            let (word, bit) = (usize::from(vector / 64), 1 << (vector % 64));
            if self.pending[word] & bit != 0 && !self.is_masked(vector) {
                self.pending[word] &= !bit;
                ready.push((vector, self.message(vector)));
            }
        }
        ready
    }

    fn is_masked(&self, vector: u16) -> bool {
        !self.bus_master
            || self.function_masked
            || self.entries[usize::from(vector)].control & VECTOR_MASKED != 0
    }

    fn message(&self, vector: u16) -> MsiMessage {
        let entry = &self.entries[usize::from(vector)];
        MsiMessage { address: entry.address, data: entry.data }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MESSAGE: MsiMessage = MsiMessage { address: 0x1_fee0_1004, data: 0x4023 };

    /// Table with three masked vectors. Vector 1 has a message.
    fn table() -> MsixTable {
        let mut table = MsixTable::new(3);
        table.set_bus_master(true);
        table.write_table(16, &MESSAGE.address.to_le_bytes());
        table.write_table(24, &MESSAGE.data.to_le_bytes());
        table
    }

    fn mask(table: &mut MsixTable, vector: u64, masked: bool) {
        table.write_table(vector * 16 + 12, &u32::from(masked).to_le_bytes());
    }

    fn pending(table: &MsixTable) -> u8 {
        let mut data = [0; 8];
        table.read_pending(0, &mut data);
        data[0]
    }

    #[test]
    fn unmasked_vector_is_sent_at_once() {
        let mut table = table();
        table.set_control(CONTROL_ENABLE);
        mask(&mut table, 1, false);
        assert_eq!(table.raise(1), Some(MESSAGE));
        assert_eq!(pending(&table), 0);
    }

    #[test]
    fn masked_vector_stays_pending_until_unmasked() {
        let mut table = table();
        table.set_control(CONTROL_ENABLE);
        assert_eq!(table.raise(1), None);
        assert_eq!(table.raise(1), None);
        assert_eq!(pending(&table), 0b10);
        assert_eq!(table.take_ready(), []);
        mask(&mut table, 1, false);
        assert_eq!(table.take_ready(), [(1, MESSAGE)]);
        assert_eq!(pending(&table), 0);
        assert_eq!(table.take_ready(), []);
    }

    #[test]
    fn function_mask_blocks_all_vectors() {
        let mut table = table();
        mask(&mut table, 1, false);
        table.set_control(CONTROL_ENABLE | CONTROL_FUNCTION_MASK);
        assert_eq!(table.raise(1), None);
        assert_eq!(table.take_ready(), []);
        table.set_control(CONTROL_ENABLE);
        assert_eq!(table.take_ready(), [(1, MESSAGE)]);
    }

    #[test]
    fn function_without_bus_mastering_sends_nothing() {
        let mut table = table();
        mask(&mut table, 1, false);
        table.set_control(CONTROL_ENABLE);
        table.set_bus_master(false);
        assert_eq!((table.raise(1), table.deliverable(1)), (None, None));
        assert_eq!(table.take_ready(), []);
        table.set_bus_master(true);
        assert_eq!(table.take_ready(), [(1, MESSAGE)]);
    }

    #[test]
    fn disabled_msix_neither_sends_nor_stores() {
        let mut table = table();
        mask(&mut table, 1, false);
        assert_eq!(table.raise(1), None);
        assert_eq!(pending(&table), 0);
    }

    #[test]
    fn capability_has_size_and_offsets() {
        let (body, writable) = capability(5, 2, 0x4000, 0x5000);
        assert_eq!(body, [4, 0, 2, 0x40, 0, 0, 2, 0x50, 0, 0]);
        assert_eq!(writable, [0, 0xc0]);
    }

    proptest! {
        #[test]
        fn arbitrary_accesses_lose_no_interrupt(
            operations in prop::collection::vec((0..5u8, 0..80u64, prop::collection::vec(any::<u8>(), 0..9)), 0..60),
        ) {
            let mut table = MsixTable::new(3);
            // Oracle: while MSI-X is on, each raise that returned no message should be delivered
            // later.
            let mut expected_interrupts = [false; 3];
            for (kind, offset, mut data) in operations {
                match kind {
                    0 => table.write_table(offset, &data),
                    1 => table.read_table(offset, &mut data),
                    2 => table.set_control(u16::from(data.first().copied().unwrap_or(0x80)) << 8),
                    3 => table.set_bus_master(offset % 4 != 0),
                    _ => {
                        let vector = offset as u16;
                        let sent = table.raise(vector).is_some();
                        if let Some(expected_interrupts) = expected_interrupts.get_mut(usize::from(vector)) {
                            *expected_interrupts |= table.is_enabled() && !sent;
                        }
                    }
                }
                for (vector, _) in table.take_ready() {
                    prop_assert!(std::mem::take(&mut expected_interrupts[usize::from(vector)]));
                }
            }
            table.set_control(CONTROL_ENABLE);
            table.set_bus_master(true);
            (0..3).for_each(|vector| mask(&mut table, vector, false));
            let ready: Vec<u16> = table.take_ready().into_iter().map(|(vector, _)| vector).collect();
            let expected: Vec<u16> = (0..3).filter(|vector| expected_interrupts[usize::from(*vector)]).collect();
            prop_assert_eq!(ready, expected);
        }
    }
}

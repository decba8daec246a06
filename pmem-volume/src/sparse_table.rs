//! Table that allocates memory only for parts that are in use, because its length is untrusted.

use std::ops::Range;
use std::sync::OnceLock;

/// Number of values in a part.
const PART: u32 = 1024;

/// Table of values by index. A value is created when its part is first used.
pub(crate) struct SparseTable<T> {
    len: u32,
    new_value: fn() -> T,
    parts: Box<[OnceLock<Box<[T]>>]>,
}

impl<T> SparseTable<T> {
    /// Creates a table of `len` values without parts.
    pub(crate) fn new(len: u32, new_value: fn() -> T) -> Self {
        Self { len, new_value, parts: (0..len.div_ceil(PART)).map(|_| OnceLock::new()).collect() }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the value at an index. `None` if its part was never used.
    ///
    /// # Panics
    /// Panics if the index is not inside the table.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        assert!(index < self.len, "index {index} is not inside the table");
        let part = self.parts[(index / PART) as usize].get()?;
        Some(&part[(index % PART) as usize])
    }

    /// Returns the value at an index, and creates its part if necessary.
    ///
    /// # Panics
    /// Panics if the index is not inside the table.
    #[inline]
    pub(crate) fn get_or_create(&self, index: u32) -> &T {
        assert!(index < self.len, "index {index} is not inside the table");
        let number = index / PART;
        let new_part = || self.part(number).map(|_| (self.new_value)()).collect();
        &self.parts[number as usize].get_or_init(new_part)[(index % PART) as usize]
    }

    /// Returns the indexes whose parts are in use.
    pub(crate) fn used_indexes(&self) -> impl Iterator<Item = u32> {
        let used = (0..).zip(&self.parts).filter(|(_, part)| part.get().is_some());
        used.flat_map(|(number, _)| self.part(number))
    }

    /// Returns the end of the unused part that contains an index, or `None` if it is in use.
    pub(crate) fn unused_end(&self, index: u32) -> Option<u32> {
        let number = index / PART;
        self.parts[number as usize].get().is_none().then(|| self.part(number).end)
    }

    fn part(&self, number: u32) -> Range<u32> {
        number * PART..((number + 1) * PART).min(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_parts_in_use_are_created() {
        let table = SparseTable::new(2 * PART + 5, || 7);
        assert_eq!((table.get(PART), table.get_or_create(2 * PART + 4)), (None, &7));
        assert_eq!((table.get(2 * PART), table.get(3)), (Some(&7), None));
        assert!(table.used_indexes().eq(2 * PART..2 * PART + 5));
        assert_eq!((table.unused_end(3), table.unused_end(2 * PART)), (Some(PART), None));
        table.get_or_create(0);
        assert!(table.used_indexes().eq((0..PART).chain(2 * PART..2 * PART + 5)));
    }

    #[test]
    fn largest_table_needs_little_memory() {
        let table = SparseTable::new(1 << 28, || 0u32);
        assert!(size_of_val(&*table.parts) <= 8 << 20);
    }

    #[test]
    #[should_panic(expected = "index 5 is not inside the table")]
    fn index_outside_panics() {
        SparseTable::new(5, || 0).get_or_create(5);
    }
}

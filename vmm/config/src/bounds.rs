//! Bounds of numbers and sizes.

use std::ops::RangeInclusive;

use super::FlagValue;
use crate::error::ConfigError;
use foreshore_types::size::Size;

/// Number or size, or an `Option` of one.
pub trait Numeric<T> {
    fn number(&self) -> Option<T>;
}

macro_rules! numeric {
    ($($Number:ty)*) => { $(
        impl Numeric<$Number> for $Number {
            fn number(&self) -> Option<$Number> {
                Some(*self)
            }
        }

        impl Numeric<$Number> for Option<$Number> {
            fn number(&self) -> Option<$Number> {
                *self
            }
        }
    )* };
}

numeric!(u8 u16 u32 u64);

/// Checks that a value is within its bounds. Accepts a missing key.
pub fn check_range<T: FlagValue + Copy + Into<u64>>(
    flag: &'static str,
    key: &'static str,
    value: &impl Numeric<T>,
    range: &RangeInclusive<T>,
) -> Result<(), ConfigError> {
    let Some(value) = value.number() else { return Ok(()) };
    let [value, least, most] = [value, *range.start(), *range.end()].map(Into::into);
    match value {
        _ if (least..=most).contains(&value) => Ok(()),
        _ if !T::IS_SIZE => Err(ConfigError::OutOfRange { flag, key, value, least, most }),
        _ if value < least => {
            Err(ConfigError::TooSmall { flag, key, value: Size(value), least: Size(least) })
        }
        _ => {
            let (value, most) = (Size(value), Size(most));
            Err(ConfigError::TooLarge { flag, key, value, most, because: "" })
        }
    }
}

/// Text of the bounds for the help. `V` is the type of the key.
pub fn range_text<V: Numeric<T>, T: FlagValue>(range: &RangeInclusive<T>) -> String {
    let [least, most] = [range.start(), range.end()].map(|bound| bound.show().unwrap_or_default());
    format!("{least} to {most}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text_value;

    /// 64-bit number that is not a size.
    #[derive(Clone, Copy)]
    struct Count(u64);

    text_value!(Count, "N", "a whole number", |text| text.parse().ok().map(Count));

    impl From<Count> for u64 {
        fn from(count: Count) -> Self {
            count.0
        }
    }

    impl Numeric<Self> for Count {
        fn number(&self) -> Option<Self> {
            Some(*self)
        }
    }

    #[test]
    fn only_sizes_have_units_in_errors() {
        let error = |checked: Result<(), ConfigError>| checked.unwrap_err().to_string();
        let count = check_range("--a", "b", &Count(4096), &(Count(1)..=Count(8)));
        assert_eq!(error(count), "--a: b is 4096, and must be 1 to 8");
        let size = check_range("--a", "b", &4096_u64, &(1..=8));
        assert_eq!(error(size), "--a: b is 4 KiB, and must be at most 8 bytes");
    }
}

//! Bounds of numbers and sizes.

use std::ops::RangeInclusive;

use super::super::error::ConfigError;
use super::super::size::Size;
use super::FlagValue;

/// A number or a size.
pub(crate) trait Number: Copy + PartialOrd + FlagValue {
    /// Error for a value that is not from `least` to `most`.
    fn error(flag: &'static str, key: &'static str, value: Self, least: Self, most: Self) -> ConfigError;
}

/// A key that has a number, or may have one.
pub(crate) trait Numeric<T> {
    /// The number.
    fn number(&self) -> Option<T>;
}

macro_rules! numbers {
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

macro_rules! counts {
    ($($Count:ty)*) => { $(
        impl Number for $Count {
            fn error(
                flag: &'static str,
                key: &'static str,
                value: Self,
                least: Self,
                most: Self,
            ) -> ConfigError {
                let [value, least, most] = [value, least, most].map(u64::from);
                ConfigError::OutOfRange { flag, key, value, least, most }
            }
        }
    )* };
}

numbers!(u8 u16 u32 u64);
counts!(u8 u16 u32);

impl Number for u64 {
    fn error(flag: &'static str, key: &'static str, value: u64, least: u64, most: u64) -> ConfigError {
        let is_small = value < least;
        let [value, least, most] = [value, least, most].map(Size);
        match is_small {
            true => ConfigError::TooSmall { flag, key, value, least },
            false => ConfigError::TooLarge { flag, key, value, most, because: "" },
        }
    }
}

/// Checks a value against its bounds, if it is given.
pub(crate) fn check_range<T: Number>(
    flag: &'static str,
    key: &'static str,
    value: &impl Numeric<T>,
    range: &RangeInclusive<T>,
) -> Result<(), ConfigError> {
    match value.number() {
        Some(value) if !range.contains(&value) => {
            Err(T::error(flag, key, value, *range.start(), *range.end()))
        }
        _ => Ok(()),
    }
}

/// Bounds in the help, of a key of type `V`.
pub(crate) fn range_text<V: Numeric<T>, T: Number>(range: &RangeInclusive<T>) -> String {
    let [least, most] = [range.start(), range.end()].map(|bound| bound.show().unwrap_or_default());
    format!("{least} to {most}")
}

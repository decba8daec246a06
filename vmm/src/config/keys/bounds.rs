//! Bounds of numbers and sizes.

use std::ops::RangeInclusive;

use super::super::error::ConfigError;
use super::super::size::Size;
use super::FlagValue;

/// Value that is a number or a size, or an option of one.
pub(crate) trait Numeric<T> {
    /// Its value.
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

/// Checks a value against its bounds, if it is given. A `u64` is a size, as in [`FlagValue`].
pub(crate) fn check_range<T: Copy + Into<u64>>(
    flag: &'static str,
    key: &'static str,
    value: &impl Numeric<T>,
    range: &RangeInclusive<T>,
) -> Result<(), ConfigError> {
    let Some(value) = value.number() else { return Ok(()) };
    let is_size = size_of::<T>() == size_of::<u64>();
    let [value, least, most] = [value, *range.start(), *range.end()].map(Into::into);
    match value {
        _ if (least..=most).contains(&value) => Ok(()),
        _ if !is_size => Err(ConfigError::OutOfRange { flag, key, value, least, most }),
        _ if value < least => {
            Err(ConfigError::TooSmall { flag, key, value: Size(value), least: Size(least) })
        }
        _ => {
            let (value, most) = (Size(value), Size(most));
            Err(ConfigError::TooLarge { flag, key, value, most, because: "" })
        }
    }
}

/// Bounds in the help, of a key of type `V`.
pub(crate) fn range_text<V: Numeric<T>, T: FlagValue>(range: &RangeInclusive<T>) -> String {
    let [least, most] = [range.start(), range.end()].map(|bound| bound.show().unwrap_or_default());
    format!("{least} to {most}")
}
